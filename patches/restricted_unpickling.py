"""Keeps code that is pickled in a checkpoint from running when it is loaded: see
`cp_ring.megatron.checkpoints.gates`.

Torch reads `.metadata` with `pickle.load` and byte entries with `weights_only=False`; Megatron
reads common.pt by `torch.load`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement

_READERS_OF_EXTRA_STATE = (
    "transformer_engine.pytorch.module.base",
    "transformer_engine.pytorch.ops.op",
    "megatron.core.extensions.transformer_engine",
)


def _replacements() -> Iterator[Replacement]:
    import megatron.core  # noqa: F401  (so that what reads extra states is imported)
    import torch
    import torch.distributed.checkpoint.filesystem as filesystem

    from cp_ring.megatron.checkpoints import gates

    yield filesystem, "pickle", gates.PickleOfIndex()
    yield torch, "load", gates.gated_torch_load(torch.load)
    original = torch.storage._load_from_bytes  # megatron.core has put its own there
    storage = gates.gated_storage(original)
    yield torch.storage, "_load_from_bytes", storage
    # tensors are pickled by this name
    yield sys.modules[original.__module__], original.__name__, storage
    for name in _READERS_OF_EXTRA_STATE:
        if hasattr(sys.modules.get(name), "pickle"):
            yield sys.modules[name], "pickle", gates.PickleOfExtraState()
    yield torch.jit, "load", gates.gated_jit_load(torch.jit.load)


PATCH = Patch(
    what="lets checkpoints build plain values and known types only, unless "
    "--cp-ring-trust-checkpoint",
    why="whoever can write to a checkpoint could otherwise run code in every job that loads it",
    package="torch",
    versions=">=2.9",
    replacements=_replacements,
)
