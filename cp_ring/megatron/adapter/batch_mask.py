"""Accepts an attention mask tensor in a batch if it equals the mask that the layer declares."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.notes import note
from cp_ring.plan.layout import Layout
from cp_ring.runtime import RUNTIME

_QUERIES_AT_ONCE = 1024  # bounds the memory of a comparison
_accepted: WeakTensorKeyDictionary = RUNTIME.keep(WeakTensorKeyDictionary())
"""For each mask tensor that was found causal: its version, and the layout and the rank whose causal
mask it is.

All layers of a microbatch get the same tensor.
"""


def accept_causal(mask: torch.Tensor, layout: Layout, rank: int) -> None:
    """Check that `mask` is the causal mask of the tokens of `rank` in `layout`. Ring attention then
    ignores it.

    Args:
        mask: bool [1 or batch, 1 or heads, queries, n keys], true where the query does not see the
            key, as Megatron's data sets make it.

    Raises:
        ConfigError: for any other mask.
    """
    key = -1 if mask.is_inference() else mask._version, layout, rank
    if key[0] >= 0 and _accepted.get(mask) == key:
        return
    positions = torch.from_numpy(layout.positions(rank)).to(mask.device)
    alike = mask.dtype == torch.bool and mask.shape[2:] == (len(positions), layout.n)
    keys = torch.arange(layout.n, device=mask.device)
    equal = torch.tensor(alike, device=mask.device)
    for first in range(0, len(positions) * alike, _QUERIES_AT_ONCE):
        queries = slice(first, first + _QUERIES_AT_ONCE)
        equal &= (mask[:, :, queries] == (keys > positions[queries, None])).all()
    if not equal:
        raise ConfigError(
            f"the batch holds an attention mask ({mask.dtype} {list(mask.shape)}) that is not the "
            "causal one of this rank's tokens: leave it out "
            "(--no-create-attention-mask-in-dataloader), and give another mask as cp_ring_mask in "
            "the batch (--cp-ring-mask-kinds)"
        )
    _accepted[mask] = key
    note(
        "the batches hold the causal attention mask, which ring attention does not need: "
        "--no-create-attention-mask-in-dataloader saves making it"
    )
