"""Keeps code that is pickled in a checkpoint from running when it is loaded: see `cp_ring.megatron.checkpoints.unpickle`.

Torch reads `.metadata` with `pickle.load` and byte entries with `weights_only=False`; Megatron reads common.pt by `torch.load`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import torch
    import torch.distributed.checkpoint.filesystem as filesystem

    from cp_ring.megatron.checkpoints import unpickle

    yield filesystem, "pickle", unpickle.PickleOfIndex()
    yield torch, "load", unpickle.gated_torch_load(torch.load)
    yield torch.jit, "load", unpickle.gated_jit_load(torch.jit.load)


PATCH = Patch(
    name="restricted_unpickling",
    what="lets checkpoints build plain values and known types only, unless --cp-ring-trust-checkpoint",
    why="whoever can write to a checkpoint could otherwise run code in every job that loads it",
    package="torch",
    versions=">=2.9",
    replacements=_replacements,
)
