"""Checks that ranks that split a batch hold the same one. Each rank takes its part of it, so rows
of two batches would become one sequence, and nothing after the split could tell.

The ranks of a group compare a digest of the whole batch in their first `FIRST` microbatches, then
in one of `EVERY`. For a comparison, the host waits for 8 bytes of each tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.agreement import Meetings, is_due
from cp_ring.errors import PlanError

EVERY = 16  # the default of `Options.compare_every`
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FACTORS = -7046029254386353131, -4658895280553007687  # odd, of 64 bits


class BatchComparison:
    """Compares the batches of one rank with those of the other ranks of its group. Only these ranks
    share `store`.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self._meetings, self._number = Meetings(store, rank, size, "batches"), 0

    def check(self, tensors: Mapping[str, Tensor], every: int) -> None:
        """Compare the tensors of this microbatch, by name, with those of the other ranks. Raises
        `PlanError` on all ranks if they differ.
        """
        self._number += 1
        if is_due(self._number, every):
            mine, what = contents(tensors), "has a batch to split"
            if line := self._meetings.meet(mine, difference, what):
                raise PlanError(line)


def check_same_batch(transport: Any, tensors: Mapping[str, Any], every: int = EVERY) -> None:
    """Compare the tensors of integers among `tensors` over the ranks of a `Transport`, which must
    hold the same ones. It is a collective in the first `FIRST` calls, then in one of `every`; 0 is
    none. None as the transport means that there is no other rank.

    Nothing is compared while a CUDA graph is captured. Raises `PlanError` on all ranks if ranks
    differ: it names the tensors and the ranks.
    """
    integers = {
        name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.dtype in _INTEGERS
    }
    check = getattr(transport, "check_batch", None)
    if check is None or transport.size == 1 or not integers:
        return
    if any(x.is_cuda for x in integers.values()) and torch.cuda.is_current_stream_capturing():
        return
    check(integers, every)


def contents(tensors: Mapping[str, Tensor]) -> dict[str, tuple[list[int], int]]:
    """Return the shape and a digest of each tensor, by name."""
    digests = [_digest(x) for x in tensors.values()]  # all, before the host waits for one
    named = zip(tensors.items(), digests, strict=True)
    return {name: ([*x.shape], int(digest)) for (name, x), digest in named}


def difference(batches: Mapping[int, Mapping[str, Any]]) -> str:
    """Return one line that says in which tensors the batches of ranks differ, and between which
    ranks; "" if they are equal.
    """
    lines = []
    for name in dict.fromkeys(name for batch in batches.values() for name in batch):
        held = {rank: batch.get(name, ("absent", 0)) for rank, batch in batches.items()}
        by_shape = len({str(shape) for shape, _ in held.values()}) > 1
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, (shape, digest) in held.items():
            ranks[str(shape if by_shape else digest)].append(rank)
        if len(ranks) > 1:
            groups = [_ranks(those) + f" ({what})" * by_shape for what, those in ranks.items()]
            lines.append(f"{name} of {' and of '.join(groups)} differ")
    if not lines:
        return ""
    return (
        f"ranks of the group hold different batches: {'; '.join(lines)}. Each takes its part of "
        "one batch: let the loader deal rows by data-parallel rank, so that all context-parallel "
        "ranks get the same ones"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _digest(x: Tensor) -> Tensor:
    """Return a number of 64 bits that depends on values and places of integers, on their device:
    int64 [].
    """
    values = x.detach().reshape(-1).to(torch.int64)
    mixed = (values + torch.arange(1, len(values) + 1, device=x.device) * _FACTORS[0]) * _FACTORS[1]
    return ((mixed ^ (mixed >> 29)) * _FACTORS[0]).sum()
