"""Finds the next token of the same document for multi-token prediction, whichever rank holds it.

Megatron's own roll knows two layouts: the zigzag of a batch row, and the zigzag of each document,
whose offsets it takes without padding. It also weighs each rank's prediction loss by that rank's
numbers of tokens before and after the roll. Here the numbers are those of all ranks together. So
the weight is the same at any context-parallel size, and a rank whose own tokens do not count in the
loss still trains the prediction of the first token after its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import documents_of, group_of_microbatch
from cp_ring.megatron.wrapping import Function
from cp_ring.sharding import unshard


@dataclass(frozen=True)
class CountedMask:
    """A rank's part of a loss mask, [batch, n / cp], in the place of the tensor: Megatron asks for
    its `sum()`, which is the mean over ranks, and rolls it. In development it also multiplies
    losses by it, and looks where it is 0.
    """

    part: torch.Tensor
    mean: torch.Tensor

    def sum(self) -> torch.Tensor:
        """Return the sum over all ranks divided by their number, because Megatron averages over
        ranks what it multiplies by this.
        """
        return self.mean

    def __mul__(self, losses: torch.Tensor) -> torch.Tensor:
        return self.part * losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


def in_megatrons_form(roll: Function) -> Function:
    """Turn `roll(tensor, fill, ...)`, which returns a rolled tensor and its sum, into a hook of
    Megatron's `roll_tensor`: of None it is None. In development it is of a list of tensors, a loss
    mask has its sum with it, and a mask of padding ends with padding.
    """

    def hook(_: Function, given: Any, *args: Any, **kwargs: Any) -> Any:
        if given is None:
            return None, None
        if not isinstance(given, list):
            return roll(given, False, *args, **kwargs)
        pairs = (roll(x, x.dtype == torch.bool, *args, **kwargs) for x in given)
        return [CountedMask(x, total) if x.is_floating_point() else x for x, total in pairs]

    return hook


@in_megatrons_form
def roll_in_documents(
    tensor: torch.Tensor | CountedMask,
    fill: bool,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace Megatron's `roll_tensor`, which rolls by -1 in the last dimension: return the value
    of the next token in the document for each token (`fill` for the last token), and the sum of the
    result. A collective of `cp_group`.

    For a loss mask the sum is the mean over ranks, because Megatron averages over ranks what it
    divides by the sum. tensor: [batch, n / cp], of any dtype.
    """
    if shifts != -1 or dims not in (-1, len(tensor.shape) - 1):
        raise ValueError(
            f"tokens roll by -1 in the last dimension, not by {shifts} in dimension {dims}"
        )
    group = group_of_microbatch(packed_seq_params, cp_group)
    cp = group.size()
    n = tensor.shape[-1]
    documents = documents_of(packed_seq_params, (tensor.numel() // n, n), cp, in_force())
    whole = tensor.reshape(-1)
    if cp > 1:
        whole = unshard(whole, documents.layout, group, 0)
    rolled = torch.roll(whole, -1).masked_fill(documents.last().to(whole.device), fill)
    mine = documents.shard(rolled, group.rank()).view(tensor.shape)
    if not tensor.is_floating_point():
        return mine, mine.sum()
    total = rolled.sum() / cp  # mean over ranks, for a loss mask
    # Megatron divides by 1 at least; where the right divisor is smaller, the mask grows by the
    # ratio
    least = torch.where((total > 0) & (total < 1), total, 1.0)
    return mine / least, total / least


def with_all_tokens(process: Function, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
    """Wrap `process_mtp_loss`: its two token counts, before and after the roll, become the counts
    of all ranks together.
    """
    labels = kwargs.get("labels")
    group = group_of_microbatch(kwargs.get("packed_seq_params"), cp_group)
    if labels is not None and group.size() > 1:
        mask = kwargs.get("loss_mask")
        mask = torch.ones_like(labels, dtype=torch.float32) if mask is None else mask
        total = mask.sum()
        dist.all_reduce(total, group=group)
        kwargs["loss_mask"] = CountedMask(mask, total / group.size())
    return process(*args, cp_group=cp_group, **kwargs)
