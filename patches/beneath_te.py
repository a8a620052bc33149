"""Runs the ring beneath TransformerEngine's own context parallelism (--cp-ring-beneath te)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cp_ring.megatron.settings import current
from cp_ring.patches.patch import Patch


@contextmanager
def _on_the_ring() -> Iterator[None]:
    from cp_ring.integrations.transformer_engine import COMM_TYPES, use_ring

    undo = use_ring(COMM_TYPES, **current().of_ring())
    yield
    undo()


PATCH = Patch(
    what="runs TransformerEngine's attention over several ranks on the ring, in layers of any "
    "class",
    why="its own ring rejects windows and sinks, and --cp-ring cannot replace derived classes",
    needed=lambda args, options: options.beneath,
    within=_on_the_ring,
)
