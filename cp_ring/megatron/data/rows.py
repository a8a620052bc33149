"""Compares the batch rows [b, n] of a microbatch between context-parallel ranks, and
splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from cp_ring.comm.groups import transport_for
from cp_ring.comm.same_batch import check_same_batch
from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import DocumentParams
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask
from cp_ring.megatron.settings import current

if TYPE_CHECKING:
    from cp_ring.megatron.data.masks import DeclaredMask


def check_rows(batch: Mapping[str, Any], group: Any) -> None:
    """Raise `PlanError` on all ranks of `group` if their integer tensors differ; see
    `cp_ring.comm.same_batch`.
    """
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
    if tensors and isinstance(group, torch.distributed.ProcessGroup) and group.size() > 1:
        transport = transport_for(group, next(iter(tensors.values())).device)
        check_same_batch(transport, tensors, current().compare_every)


def on_this_cp_rank(
    batch: dict[str, torch.Tensor], rank: int, cp: int, carried: MicrobatchMask | None
) -> dict[str, Any]:
    """Return the part [b, n / cp] of each tensor [b, n] that context-parallel rank `rank` of `cp`
    holds, and the documents or the mask of the microbatch, which split it, as `packed_seq_params`.
    Without these the layout in force splits each batch row.
    """
    if carried is not None:
        parts = {name: carried.shard(tensor, rank) for name, tensor in batch.items()}
        return parts | {"packed_seq_params": DocumentParams.carry(carried)}
    if cp > 1:
        split = in_force().split
        batch = {
            name: split.layout_of(tensor.shape[1], cp).shard(tensor, rank, 1)
            for name, tensor in batch.items()
        }
    return batch | {"packed_seq_params": None}


def declare(entry: Any, batch: int, n: int, cp: int) -> DeclaredMask:
    """Return the mask of a microbatch from its entry `cp_ring_mask`, split by the
    layout in force.
    """
    check_length(n, cp)
    if entry is not None and not current().kinds:
        raise ConfigError(
            f"the batch carries {KEY}, but the job declares no kinds of masks: give "
            "--cp-ring-mask-kinds"
        )
    from cp_ring.megatron.data.masks import DeclaredMask, read  # few jobs declare masks

    masks = read(entry, batch, n, current().kinds)
    return DeclaredMask.of_rows(masks, cp, in_force().split)


def check_length(n: int, cp: int) -> None:
    chunks = current().named_layout.chunks * cp
    if n % chunks and cp > 1:
        raise ConfigError(
            f"batch rows of {n} tokens cannot be split over {cp} context-parallel ranks by layout "
            f"{current().layout}: pad them to a multiple of {chunks}, and make the mask with "
            f"n={-(-n // chunks) * chunks}"
        )
