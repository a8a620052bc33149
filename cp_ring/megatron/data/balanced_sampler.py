"""Reorders the batch rows of each step so that all microbatches take equally long:
--cp-ring-balance-microbatches.

Megatron's samplers deal out the rows of a step in the order of the data set. This sampler deals out
the same rows, but a row may move to another microbatch of the step, and to another data-parallel
rank. It wraps Megatron's sampler. Every rank runs the samplers of all ranks, which are lists of
numbers, and finds the same order from the lengths of the documents in each row. Rows that must be
read for this are shared out: each rank reads some, and all gather the work of all.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed
from megatron.core import parallel_state

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import boundaries
from cp_ring.megatron.adapter.microbatch_mask import KEY, narrowed
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.data.masks import read
from cp_ring.megatron.data.packing import balanced_order, imbalance
from cp_ring.megatron.settings import current
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints

FLAG = "--cp-ring-balance-microbatches"


class BalancedSampler:
    """Yields the microbatches (lists of row numbers) of the data-parallel rank of `sampler`, with
    the rows of each step in balanced order.

    Args:
        sampler: Megatron's, for one data-parallel rank. Steps begin with its first microbatch. All
            ranks have equally many.
        microbatches: microbatches of a rank in a step.
        work: returns the work of rows, float64 [rows], by their numbers, int64 [rows].
    """

    def __init__(self, sampler: Any, microbatches: int, work: Callable[[Ints], np.ndarray]):
        self.sampler = sampler
        self.microbatches = microbatches
        self.work = work
        self._given = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        rank = self.sampler.data_parallel_rank
        ranks = _ranks(self.sampler)
        streams = _dealt_together(
            [
                self.sampler if each == rank else _of_rank(self.sampler, each)
                for each in range(ranks)
            ]
        )
        # A sampler that restarts after the last row may do so within a step.
        while step := list(
            itertools.islice(streams, self.microbatches - self._given % self.microbatches)
        ):
            self._given += len(step)
            yield from self._ordered(step)[rank]

    def _ordered(self, step: list[tuple[list[int], ...]]) -> list[list[list[int]]]:
        """Balance the rows of a step: [microbatches, ranks, rows] as read to [ranks, microbatches,
        rows].
        """
        numbers = np.array(step, np.int64).swapaxes(0, 1)
        work = self.work(numbers.reshape(-1)).reshape(numbers.shape)
        order = balanced_order(work)
        if self._given <= self.microbatches:
            read, ranks_read = imbalance(work)
            dealt, ranks_dealt = imbalance(work.reshape(-1)[order])
            note(
                f"{FLAG}: in the first step the longest microbatch has {dealt:.2f} times the mean "
                f"work, as read {read:.2f}; the busiest data-parallel rank {ranks_dealt:.2f}, as "
                f"read {ranks_read:.2f}"
            )
        return numbers.reshape(-1)[order].tolist()


def _dealt_together(samplers: Sequence[Any]) -> Iterator[tuple[list[int], ...]]:
    """Yield the next microbatch of each rank. Raises `ConfigError` if some ranks have fewer."""
    for number, dealt in enumerate(itertools.zip_longest(*samplers)):
        if None in dealt:
            counts = [number + (rows is not None) for rows in dealt]
            raise ConfigError(
                f"{FLAG}: the sampler has unequal numbers of microbatches for the data-parallel "
                f"ranks, at least {counts}"
            )
        yield dealt


def _ranks(sampler: Any) -> int:
    return int(sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size)


def _of_rank(sampler: Any, rank: int) -> Any:
    other = copy.copy(sampler)
    other.data_parallel_rank = rank
    return other


def balanced_loader(build: Callable[..., Any], dataset: Any, *rest: Any, **named: Any) -> Any:
    """Wrap Megatron's `build_pretraining_data_loader`; the loader of training data deals out rows
    in balanced order.
    """
    loader = build(dataset, *rest, **named)
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or not _trains(dataset):
        return loader
    args = compat.arguments()
    ranks = _ranks(sampler)
    if args.micro_batch_size * ranks == 1:
        note(
            f"{FLAG} changes nothing with --micro-batch-size 1 on one data-parallel rank: every "
            "batch row is a microbatch"
        )
        return loader
    microbatches = args.global_batch_size // (args.micro_batch_size * ranks)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # torch's DataLoader does not accept another sampler once it is made, but reads this attribute
    # when it is iterated.
    object.__setattr__(
        loader,
        "batch_sampler",
        BalancedSampler(sampler, microbatches, lambda rows: work_of_rows(dataset, rows, group)),
    )
    return loader


def work_of_rows(dataset: Any, rows: Ints, group: Any) -> np.ndarray:
    """Return the work of rows, float64 [rows], by their numbers, int64 [rows]. Each rank of the
    group measures some of them; all call this with the same rows.
    """
    rank = group.rank()
    ranks = group.size()
    parts = [[work_of(dataset, int(row)) for row in rows[rank::ranks]]]
    if ranks > 1:
        own, parts = parts[0], [[]] * ranks
        torch.distributed.all_gather_object(parts, own, group=group)
    work = np.empty(len(rows))
    for first, part in enumerate(parts):
        work[first::ranks] = part
    return work


def _trains(dataset: Any) -> bool:
    """Return True if a data set is for training, not for validation or test, by Megatron's own
    rule.
    """
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return getattr(split, "name", "train") == "train"


def work_of(dataset: Any, index: int) -> float:
    """Return the attention work of row `index`, in query-key pairs summed over all layers."""
    row = row_of(dataset, index)
    return float(sum(count * narrowed(row, window).area() for window, count in in_force().windows))


def row_of(dataset: Any, index: int) -> Mask:
    """Return the mask of row `index`, of its documents or declared.

    `PackedConversations` know the documents of their rows, also in a blend. For other data sets the
    sample is read.
    """
    numbers = (
        getattr(dataset, "dataset_index", None),
        getattr(dataset, "dataset_sample_index", None),
    )
    if numbers[0] is not None and numbers[1] is not None:
        return row_of(dataset.datasets[int(numbers[0][index])], int(numbers[1][index]))
    if hasattr(dataset, "offsets"):
        return Mask.documents(dataset.offsets(index))
    sample = dataset[index]
    if current().kinds:
        return read(sample.get(KEY), 1, len(sample["tokens"]), current().kinds)[0]
    offsets = sample.get("cu_seqlens")
    if offsets is None:
        offsets = boundaries(sample["position_ids"].unsqueeze(-2))
    return Mask.documents(offsets)
