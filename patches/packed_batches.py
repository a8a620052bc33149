"""Splits packed batches of a script (--sft, --dataloader-inter-document-masking) by
--cp-ring-layout balanced.

Megatron splits them by zigzag in one of two ways: each document separately, padded to a multiple of
2 * cp, or all documents together, which leaves ranks with unequal work. With --sft batch rows come
from cp_ring's packer, because Megatron pads each conversation.
"""

from __future__ import annotations

from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.flags.checks_documents import splits_packed
from cp_ring.patches.patch import Patch

_TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


def split_packed(
    split: Any, batch: dict[str, Any], *args: Any, cp_group: Any = None, **named: Any
) -> dict[str, Any]:
    """Replace Megatron's `get_batch_on_this_cp_rank`: return the tokens of this rank of `cp_group`
    from tensors [1, tokens].
    """
    from cp_ring.megatron.adapter.documents import of_offsets, offsets_on_cpu

    offsets = batch.get("cu_seqlens")
    if offsets is None:
        return dict(split(batch, *args, cp_group=cp_group, **named))
    if batch.get("cu_seqlens_padded") is not None:
        raise ConfigError(
            "--cp-ring-layout balanced needs no padding between documents, but the batch has "
            "cu_seqlens_padded: leave it out, or let the data set leave padding out"
        )
    group = cp_group or compat.group_of(None, "cp")
    packed = offsets_on_cpu(offsets).tobytes()
    layout = of_offsets(packed, packed, group.size(), in_force().split).layout
    held = {name: batch[name] for name in _TENSORS if batch.get(name) is not None}
    return batch | {name: layout.shard(tensor, group.rank(), 1) for name, tensor in held.items()}


PATCH = Patch(
    what="splits the packed batches of a script by --cp-ring-layout balanced, and packs the "
    "conversations of --sft without padding",
    why="Megatron pads each document or leaves ranks with unequal work, and its batches have no "
    "hook for another split",
    needed=lambda args, options: options.enabled and splits_packed(args, options),
    wraps={
        "megatron.core.utils.get_batch_on_this_cp_rank": split_packed,
        "megatron.training.datasets."
        "sft_dataset.SFTDataset": "cp_ring.megatron.data.sft.PackedWithOffsets",
    },
)
