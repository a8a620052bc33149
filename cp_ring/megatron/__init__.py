"""Everything in cp_ring that knows Megatron-core.

Importing this package imports neither Megatron nor a patch. `cp_ring.patches.install` applies the
patches that the flags ask for; `cp_ring.megatron.enable` applies the patches of a program without a
command line.
"""

from __future__ import annotations

import importlib
from typing import Any

# functions for programs that build their models themselves; imported on first use
_MODULES = {
    "enable": "cp_ring.patches.enable",  # patches may import this package, not the reverse
    "certify": "cp_ring.megatron.program",
    "plan_ahead": "cp_ring.megatron.batches",
    "split_batch": "cp_ring.megatron.batches",
    "with_ring_attention": "cp_ring.megatron.specs",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cp_ring.megatron' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "cp_ring":
            raise
        package = "'megatron-core[training]'" if missing == "megatron" else missing
        raise ImportError(
            f"cp_ring.megatron.{name} needs the package {missing}: pip install {package}"
        ) from None
