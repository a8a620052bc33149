"""Splits packed batches of a script (--sft, --dataloader-inter-document-masking) by
--cp-ring-layout balanced.

Megatron splits them by zigzag in one of two ways: each document separately, padded to a multiple of
2 * cp, or all documents together, which leaves ranks with unequal work. With --sft batch rows come
from cp_ring's packer, because Megatron pads each conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.flags.checks_documents import splits_packed
from cp_ring.patches.patch import Patch, Replacement

_TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


def split_packed(
    split: Any, batch: dict[str, Any], *args: Any, cp_group: Any = None, **named: Any
) -> dict[str, Any]:
    """Replace Megatron's `get_batch_on_this_cp_rank`: return the tokens of this rank of `cp_group`
    from tensors [1, tokens].
    """
    from megatron.core import parallel_state

    from cp_ring.megatron.adapter.documents import packed_layout

    offsets = batch.get("cu_seqlens")
    if offsets is None:
        return dict(split(batch, *args, cp_group=cp_group, **named))
    if batch.get("cu_seqlens_padded") is not None:
        raise ConfigError(
            "--cp-ring-layout balanced needs no padding between documents, but the batch has "
            "cu_seqlens_padded: leave it out, or let the data set leave padding out"
        )
    group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    edges = offsets.detach().cpu().reshape(-1).to(torch.int64).numpy()
    layout = packed_layout(edges.tobytes(), group.size(), in_force().split)
    held = {name: batch[name] for name in _TENSORS if batch.get(name) is not None}
    return batch | {name: layout.shard(tensor, group.rank(), 1) for name, tensor in held.items()}


def _replacements() -> Iterator[Replacement]:
    import megatron.training.datasets.sft_dataset as sft_dataset

    from cp_ring.megatron.data.sft import PackedWithOffsets

    yield sft_dataset, "SFTDataset", PackedWithOffsets


PATCH = Patch(
    what="splits the packed batches of a script by --cp-ring-layout balanced, and packs the "
    "conversations of --sft without padding",
    why="Megatron pads each document or leaves ranks with unequal work, and its batches have no "
    "hook for another split",
    needed=lambda args, options: options.enabled and splits_packed(args, options),
    wraps={"megatron.core.utils.get_batch_on_this_cp_rank": split_packed},
    replacements=_replacements,
)
