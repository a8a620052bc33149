"""Extends Megatron's --exit-signal-handler to early signals, and to several kinds of signals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cp_ring import signals
from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import megatron.training.global_vars as module

    from cp_ring.megatron.rejection import note

    class Handler(module.DistributedSignalHandler):
        """Agrees among all ranks as Megatron's handler does, but reads the signal from
        `cp_ring.signals`.
        """

        def __enter__(self) -> Any:
            signals.listen(self.sig)
            self.released = True  # there is no earlier handler to restore
            return self

        def signals_received(self) -> list[int]:
            self._signal_received = signals.received() is not None
            asked: list[int] = super().signals_received()
            if any(asked):
                name = getattr(signals.received(), "name", "a signal to another rank")
                note(
                    f"{name}: saving, then ending with exit code 0; the same command resumes from "
                    "there"
                )
            return asked

    yield module, "DistributedSignalHandler", Handler


PATCH = Patch(
    what="--exit-signal-handler obeys SIGUSR1, SIGTERM, SIGINT and --exit-signal, also when they "
    "came before Megatron was loaded",
    why="Megatron listens to one signal, and only once it is set up: Slurm's warning before the "
    "time limit would kill a rank",
    when="--exit-signal-handler",
    replacements=_replacements,
)
