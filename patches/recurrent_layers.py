"""Mamba and gated delta net layers under --cp-ring-layout contiguous and balanced.

These layers exchange tokens for heads, so that each rank holds whole sequences of some heads. Megatron then puts the tokens in
order, and back, as its zigzag split needs it. Here the order is that of the layout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


@functools.lru_cache(maxsize=16)
def _orders(n: int, cp: int, name: str, windows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the sequence of the tokens of rank after rank, and the inverse of this permutation: int64 [n] each."""
    from cp_ring.megatron.plans import make_layout

    layout = make_layout(name, n, cp)
    positions = np.concatenate([layout.positions(rank) for rank in range(cp)])
    return torch.from_numpy(positions), torch.from_numpy(np.argsort(positions))


def _reordered(x: torch.Tensor, cp: int, packed: Any, inverse: bool) -> torch.Tensor:
    from cp_ring.megatron.settings import current, layer_windows

    if packed is not None:
        raise ConfigError(
            f"--cp-ring-layout {current().layout}: recurrent layers support packed documents in Megatron's own split alone; "
            "give zigzag"
        )
    order = _orders(x.shape[0], cp, current().layout, layer_windows())[inverse]
    return x.index_select(0, order.to(x.device))


def in_sequence(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """The tokens [n, b, ...] of rank after rank, in the order of the sequence."""
    return _reordered(input_, cp_size, packed_seq_params, True)


def by_rank(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """The inverse of `in_sequence`."""
    return _reordered(input_, cp_size, packed_seq_params, False)


def _replacements() -> Iterator[Replacement]:
    import importlib.util

    import megatron.core.ssm.mamba_context_parallel

    if importlib.util.find_spec("megatron.core.ssm.gated_delta_net"):  # since 0.17
        import megatron.core.ssm.gated_delta_net  # noqa: F401
    found = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core.ssm") and module]
    yield from replace_everywhere(found, "_undo_attention_load_balancing", in_sequence)
    yield from replace_everywhere(found, "_redo_attention_load_balancing", by_rank)


PATCH = Patch(
    name="recurrent_layers",
    what="Mamba and gated delta net layers put tokens in order by --cp-ring-layout",
    why="Megatron's layers know the order of its zigzag split alone",
    replacements=_replacements,
)
