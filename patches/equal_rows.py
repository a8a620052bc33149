"""Checks that all context-parallel ranks of a Megatron script split the same rows; otherwise the
job ends with one line. Keeps the entries of a batch that have no token dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ring.cuts import note_cut
from cp_ring.megatron.adapter import compat
from cp_ring.patches.patch import Patch
from cp_ring.plan.layout import Layout

_TENSORS = ("tokens", "labels", "position_ids", "cu_seqlens")
_OF_SPLIT = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")


def split_equal_rows(
    split: Any,
    batch: dict[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: Any = None,
    **named: Any,
) -> dict[str, Any]:
    """Wrap Megatron's `get_batch_on_this_cp_rank`: the ranks compare their batches first.

    Entries without a token dimension, such as the `dataset_id` of a blend, are not split.
    """
    from cp_ring.megatron.data.rows import check_rows

    lengths = {batch[name].shape[1] for name in _TENSORS[:3] if batch.get(name) is not None}
    if not is_hybrid_cp:  # with hybrid cp, a microbatch names its own ranks
        group = cp_group or compat.group_of(None, "cp")
        check_rows({name: batch.get(name) for name in _TENSORS}, group)
        for n in lengths:
            note_cut(group, Layout.zigzag(n, group.size()))
    kept = {
        name: x
        for name, x in batch.items()
        if isinstance(x, torch.Tensor)
        and name not in _OF_SPLIT
        and lengths.isdisjoint(x.shape[1:3])
    }
    rest = {name: x for name, x in batch.items() if name not in kept}
    return split(rest, is_hybrid_cp, cp_group=cp_group, **named) | kept


PATCH = Patch(
    what="lets context-parallel ranks compare the rows of a script's batches before they split "
    "them",
    why="a loader that gives other rows to each rank trains on mixed halves, and nothing after "
    "the split can notice it",
    wraps={
        "megatron.core.utils.get_batch_on_this_cp_rank": split_equal_rows,
    },
    order=2,  # around the split of packed_batches
)
