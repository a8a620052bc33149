"""Extends Megatron's --exit-signal-handler to several kinds of signals, and keeps the signals from
processes that the last step and the last save need: data loader workers, checkpoint writers, and
the server of the queue through which the writers answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.managers import BaseManager
from typing import Any

from cp_ring.megatron import signals
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere
from cp_ring.runtime import RUNTIME

_loops: list[Callable[..., None]] = RUNTIME.of_process([])
"""Megatron's own loop of a persistent writer, for forked processes."""


def _replacements() -> Iterator[Replacement]:
    import megatron.training.datasets.data_samplers as data_samplers
    import megatron.training.global_vars as module
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        PersistentAsyncCaller,
        TemporalAsyncCaller,
    )
    from torch.utils.data import get_worker_info

    from cp_ring.megatron.rejection import note

    class Handler(module.DistributedSignalHandler):
        """Lets all ranks agree as Megatron's handler does, but reads the signal from
        `cp_ring.megatron.signals`.
        """

        def __enter__(self) -> Any:
            self.released = True  # there is no earlier handler to restore
            # Megatron calls this in each worker too
            if get_worker_info() is not None:
                signals.outlive_all_but_the_parent()
            return self

        def signals_received(self) -> list[int]:
            """Return the received signals; Megatron asks after each step. Before the first step, a
            signal ends the job.
            """
            signals.listen(self.sig)
            self._signal_received = signals.received() is not None
            asked: list[int] = super().signals_received()
            if any(asked):
                name = getattr(signals.received(), "name", "a signal to another rank")
                note(
                    f"{name}: saving, then ending with exit code 0; the same command resumes from "
                    "there"
                )
            return asked

    yield from replace_everywhere([module, data_samplers], "DistributedSignalHandler", Handler)
    yield BaseManager, "start", _started_apart(BaseManager.start)
    _loops[:] = [PersistentAsyncCaller.async_loop]
    yield PersistentAsyncCaller, "async_loop", staticmethod(_write_apart)
    schedule = _scheduled_apart(TemporalAsyncCaller.schedule_async_call)
    yield TemporalAsyncCaller, "schedule_async_call", schedule
    get_process = PersistentAsyncCaller._get_process.__func__

    def started(cls: Any, *arguments: Any, **named: Any) -> Any:
        with signals.blocked_in_children():
            return get_process(cls, *arguments, **named)

    yield PersistentAsyncCaller, "_get_process", classmethod(started)


def _started_apart(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap `BaseManager.start` so that the server ignores the signals from its start on."""

    def apart(
        self: BaseManager,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        with signals.blocked_in_children():
            start(self, _serve_apart, (initializer, initargs))

    return apart


def _serve_apart(initializer: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    """Start the server of the queue in the new process, where the signals do not end it."""
    signals.outlive_all_but_the_parent()
    if initializer is not None:
        initializer(*arguments)


def _write_apart(*arguments: Any) -> None:
    """Run the loop of a persistent writer in its process, where the signals do not end it."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    signals.outlive_all_but_the_parent()
    (*_loops, PersistentAsyncCaller.async_loop)[0](*arguments)


def _scheduled_apart(schedule: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TemporalAsyncCaller.schedule_async_call`, which starts a writer of one checkpoint."""

    def apart(self: Any, request: Any) -> None:
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_run_apart, request.async_fn))
        with signals.blocked_in_children():
            schedule(self, request)

    return apart


def _run_apart(write: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Run a writer in the new process, where the signals do not end it."""
    signals.outlive_all_but_the_parent()
    write(*arguments, **named)


PATCH = Patch(
    what="--exit-signal-handler obeys SIGUSR1, SIGTERM, SIGINT and --exit-signal after each step; "
    "data loader workers, checkpoint writers and the server of their queue end with their "
    "rank, and not before",
    why="Megatron listens to one signal, also before the first step, when it cannot save; its "
    "workers ignore the SIGTERM of their rank, so a rank that fails waits for them for ever; "
    "a SIGTERM to all processes ends the writers of --async-save and their queue, and the "
    "last save with them",
    needed=lambda args, options: args.exit_signal_handler,
    replacements=_replacements,
)
