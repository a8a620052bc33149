"""Extends Megatron's --exit-signal-handler to several kinds of signals, and keeps the signals from
the processes that a rank starts, because the last step and the last save need them: data loader
workers, checkpoint writers of any library, and the servers of their queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cp_ring.megatron import signals
from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import megatron.training.dist_signal_handler as module

    from cp_ring.megatron.adapter.notes import note

    class Handler(module.DistributedSignalHandler):
        """Lets all ranks agree as Megatron's handler does, but reads the signal from
        `cp_ring.megatron.signals`.
        """

        def __enter__(self) -> Any:
            self.released = True  # there is no earlier handler to restore
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
                note(f"{name}: saving, then ending; the same command resumes from there")
            return asked

    yield module, "DistributedSignalHandler", Handler


def _start_apart(start: Function, process: Any) -> None:
    process.run = partial(signals.run_in_child, process.run)
    try:
        with signals.blocked_in_children():
            start(process)
    finally:
        del process.run
    # A SIGTERM of the parent is lost while one of another process is pending.
    process._popen.terminate = process._popen.kill


PATCH = Patch(
    what="--exit-signal-handler obeys SIGUSR1, SIGTERM, SIGINT and --exit-signal after each step; "
    "processes that a rank starts by multiprocessing (data loader workers, checkpoint writers, "
    "managers) end with their rank, and not before",
    why="Megatron listens to one signal, also before the first step, when it cannot save; its "
    "workers ignore the SIGTERM of their rank, so a rank that fails waits for them for ever; "
    "a SIGTERM to all processes ends the writers of --async-save and their queue, and the "
    "last save with them",
    needed=lambda args, options: args.exit_signal_handler,
    wraps={"multiprocessing.process.BaseProcess.start": _start_apart},
    replacements=_replacements,
)
