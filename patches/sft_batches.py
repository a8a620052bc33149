"""Packed batches of --sft in scripts of Megatron before 0.18.

These scripts hand the split of packed batches no padded lengths, without which it cannot split
them. Their data set counts padding in the lengths that it gives, so these are both. Before 0.17
tensor-parallel rank 0 also sends the lengths in an order in which other ranks do not receive them,
and sends the last pipeline stage no tokens, which the split needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from cp_ring.megatron.compat import within
from cp_ring.megatron.wrapping import loaded_modules
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere

_INTEGERS, _FLOATS, _LENGTHS = (
    ("tokens", "labels", "position_ids"),
    ("loss_mask",),
    ("cu_seqlens", "max_seqlen"),
)


def split_by_document(
    batch: dict[str, Any],
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: Any,
    max_seqlen: Any,
    *sizes: Any,
) -> tuple[dict[str, Any], Any]:
    """As Megatron's `get_thd_batch_on_this_cp_rank`: this rank's tokens of each document, and the
    packed parameters.
    """
    from cp_ring.megatron.batches import OFFSETS, PADDED, split_batch

    mine = split_batch(batch | {OFFSETS: cu_seqlens, PADDED: cu_seqlens_padded})
    return {name: mine[name] for name in batch}, mine["packed_seq_params"]


def read_on_every_rank(read: Any, data_iterator: Any, *rest: Any, **named: Any) -> dict[str, Any]:
    """As Megatron's `get_batch_on_this_tp_rank`: whole packed batches, with lengths, on each rank
    of a stage that reads them.
    """
    from megatron.core import mpu, tensor_parallel
    from megatron.training import get_args

    if not get_args().sft:  # as in the certificate's probe of batch rows without documents
        return dict(read(data_iterator, *rest, **named))
    data: dict[str, torch.Tensor] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        kinds = (_INTEGERS, torch.int64), (_FLOATS, torch.float32), (_LENGTHS, torch.int32)
        data = {name: sample[name].to(kind) for names, kind in kinds for name in names}
    batch = tensor_parallel.broadcast_data([*_INTEGERS], data, torch.int64)
    batch |= tensor_parallel.broadcast_data([*_FLOATS], data, torch.float32)
    batch |= tensor_parallel.broadcast_data([*_LENGTHS], data, torch.int32)
    # scripts rely on it
    order = (
        "tokens",
        "labels",
        "loss_mask",
        "attention_mask",
        "position_ids",
        *_LENGTHS,
        "local_cp_size",
    )
    return {name: batch.get(name) for name in order}


def _replacements() -> Iterator[Replacement]:
    import megatron.core.utils
    import megatron.training.utils

    modules = loaded_modules("megatron.")
    yield from replace_everywhere(modules, "get_thd_batch_on_this_cp_rank", split_by_document)
    if within("<0.17"):
        name = "get_batch_on_this_tp_rank"
        yield from replace_everywhere(
            modules,
            name,
            functools.partial(read_on_every_rank, getattr(megatron.training.utils, name)),
        )


PATCH = Patch(
    what="scripts split the packed batches of --sft, whose lengths reach every tensor-parallel "
    "rank and pipeline stage",
    why="scripts of Megatron before 0.18 give the split no padded lengths; before 0.17 other "
    "ranks do not receive the lengths",
    when="--cp-ring --sft !--cp-ring-document-mask",
    replacements=_replacements,
    unneeded=lambda: (
        "" if within("<0.18") else "Megatron's scripts split packed batches since 0.18"
    ),
)
