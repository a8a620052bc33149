"""cp_ring inside Megatron-core: everything that knows Megatron lives here.

Importing this package imports neither Megatron nor a patch; `cp_ring.patches.install` applies the
patches that the flags ask for, and `cp_ring.megatron.enable` those that a program without a command
line asks for.
"""

from __future__ import annotations

import importlib
from typing import Any

# the functions for programs that build their models themselves; imported on first use, as in
# `cp_ring`
enable: Any
certify: Any
split_batch: Any
save_checkpoint: Any
load_checkpoint: Any

_MODULES = {
    "enable": "cp_ring.patches.enable",  # above this package: it knows the patches
    "certify": "cp_ring.megatron.program",
    "split_batch": "cp_ring.megatron.batches",
    "save_checkpoint": "cp_ring.megatron.checkpoints.whole",
    "load_checkpoint": "cp_ring.megatron.checkpoints.whole",
}

__all__ = ["certify", "enable", "load_checkpoint", "save_checkpoint", "split_batch"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'cp_ring.megatron' has no attribute {name!r}")
