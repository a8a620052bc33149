"""Runs the ring beneath TransformerEngine's own context parallelism (--cp-ring-beneath te)."""

from __future__ import annotations

from contextlib import ExitStack

from cp_ring.megatron.settings import current
from cp_ring.patches.patch import Patch
from cp_ring.runtime import RUNTIME

_undo = RUNTIME.of_process(ExitStack())


def _enter() -> None:
    from cp_ring.integrations.transformer_engine import COMM_TYPES, use_ring

    _undo.callback(use_ring(COMM_TYPES, **current().of_ring()))


PATCH = Patch(
    what="runs TransformerEngine's attention over several ranks on the ring, in layers of any "
    "class",
    why="its own ring rejects windows and sinks, and --cp-ring cannot replace derived classes",
    needed=lambda args, options: options.beneath,
    replacements=lambda: (),  # use_ring makes its own
    enter=_enter,
    leave=_undo.close,
)
