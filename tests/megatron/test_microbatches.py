"""--cp-ring-balance-microbatches: the same rows in each step, dealt out so that microbatches and
ranks have equal work.
"""

import argparse
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from megatron.training.datasets import data_samplers

from cp_ring import Mask, Options
from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.adapter.microbatch_mask import KEY
from cp_ring.megatron.data import balanced_sampler
from cp_ring.megatron.data.balanced_sampler import (
    BalancedSampler,
    balanced_loader,
    row_of,
    work_of,
    work_of_rows,
)
from cp_ring.megatron.data.packing import imbalance

WORK = np.random.default_rng(3).lognormal(0, 1, 200)


class Rows:
    """A data set of packed rows that knows its offsets; row i has i % 7 + 1 documents."""

    split = Split.train

    def __len__(self):
        return 200

    def offsets(self, index):
        return np.linspace(0, 64, index % 7 + 2).astype(np.int64)


def single(rank, ranks=2, consumed=0, rows=2, total=200):
    return data_samplers.MegatronPretrainingSampler(total, consumed, rows, rank, ranks)


def cyclic(rank, ranks=2, consumed=0, rows=2, total=44):
    return data_samplers.MegatronPretrainingRandomSampler(
        Rows(), total, consumed, rows, rank, ranks, data_sharding=False
    )


def steps(make, balanced, ranks=2, microbatches=3, count=8, **where):
    """The rows [steps, ranks, microbatches, rows], over the ends of epochs."""
    found = []
    for rank in range(ranks):
        sampler = make(rank, ranks, **where)
        sampler = BalancedSampler(sampler, microbatches, WORK.__getitem__) if balanced else sampler
        dealt = (
            itertools.chain.from_iterable(iter(sampler) for _ in range(9))
            if make is cyclic
            else iter(sampler)
        )
        found.append(list(itertools.islice(dealt, count * microbatches)))
    return np.array(found).reshape(ranks, count, microbatches, -1).swapaxes(0, 1)


@pytest.mark.parametrize("make", [single, cyclic])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_step_has_the_same_rows_in_a_more_even_order(make, ranks):
    read, dealt = (steps(make, balanced, ranks) for balanced in (False, True))
    assert not np.array_equal(read, dealt)
    for before, after in zip(read, dealt, strict=True):
        assert sorted(before.flat) == sorted(after.flat)
        assert np.all(np.array(imbalance(WORK[after])) <= np.array(imbalance(WORK[before])) + 1e-9)
    if make is single:
        ratio = [
            imbalance(WORK[before])[1] / imbalance(WORK[after])[1]
            for before, after in zip(read, dealt, strict=True)
        ]
        assert ranks == 1 or np.mean(ratio) > 1.1


def test_a_resumed_job_goes_on_with_the_same_steps():
    whole, resumed = steps(single, True), steps(single, True, count=5, consumed=3 * 12)
    assert np.array_equal(whole[3:], resumed)
    # At another data-parallel size a step has the same rows.
    other = steps(single, True, ranks=1, microbatches=6)
    assert [sorted(step.flat) for step in whole] == [sorted(step.flat) for step in other]


class Unequal:
    """A sampler that deals out one microbatch fewer to each further rank."""

    micro_batch_size, micro_batch_times_data_parallel_size = 1, 2

    def __init__(self, rank):
        self.data_parallel_rank = rank

    def __iter__(self):
        return iter([[row] for row in range(7 - self.data_parallel_rank)])


@pytest.mark.parametrize("rank", range(2))
def test_ranks_with_unequal_numbers_of_microbatches_are_rejected(rank):
    with pytest.raises(ConfigError, match=r"unequal numbers .* ranks, at least \[7, 6\]"):
        list(BalancedSampler(Unequal(rank), 2, WORK.__getitem__))


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_group", lambda **_: Group([[]], 0))
    values = argparse.Namespace(
        dataloader_type="single", micro_batch_size=2, global_batch_size=8, full_validation=False, hybrid_context_parallel=False,
        num_workers=0, exit_signal_handler=False, eval_micro_batch_size=2, eval_global_batch_size=8,
    )  # fmt: skip
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", values)
    return values


class Group:
    """A rank of a group; `read` has what each rank has measured."""

    def __init__(self, read, rank):
        self.read, self.number = read, rank

    def rank(self):
        return self.number

    def size(self):
        return len(self.read)


def test_each_row_is_read_by_one_rank(monkeypatch):
    rows, ranks, measured = np.arange(11) * 3, 4, []
    read = [WORK[rows[rank::ranks]].tolist() for rank in range(ranks)]

    def gather(parts, own, group):
        assert own == read[group.rank()]
        parts[:] = read

    def measure(dataset, row):
        measured.append(row)
        return dataset[row]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(balanced_sampler, "work_of", measure)
    for rank in range(ranks):
        assert np.array_equal(work_of_rows(WORK, rows, Group(read, rank)), WORK[rows])
    assert sorted(measured) == rows.tolist()


def build(dataset):
    return balanced_loader(data_samplers.build_pretraining_data_loader, dataset, 0)


def test_only_the_loader_of_training_data_is_changed(args, capsys, monkeypatch):
    sampler = build(Rows()).batch_sampler
    assert (
        isinstance(sampler, BalancedSampler)
        and sampler.microbatches == 2
        and len(sampler) == len(sampler.sampler)
    )
    next(iter(sampler))
    assert "in the first step the longest microbatch has" in capsys.readouterr().out
    valid = Rows()
    valid.split = Split.valid
    assert not isinstance(build(valid).batch_sampler, BalancedSampler)
    assert build(None) is None
    args.micro_batch_size = 1
    monkeypatch.setattr(data_samplers.mpu, "get_data_parallel_world_size", lambda: 1)
    assert not isinstance(build(Rows()).batch_sampler, BalancedSampler)
    assert "changes nothing with --micro-batch-size 1" in capsys.readouterr().out


def test_work_is_that_of_all_layers_for_every_kind_of_sample():
    settings.configure(Options.make(enabled=True), windows=(((-1, -1), 2), ((3, 0), 1)))
    expected = (
        2 * Mask.documents([0, 4, 10]).area() + Mask.documents([0, 4, 10], window=(3, 0)).area()
    )
    positions = torch.cat([torch.arange(4), torch.arange(6)])
    filled = torch.tensor([0, 4, 10, 10, 10], dtype=torch.int32)
    blend = SimpleNamespace(
        datasets=[[{"position_ids": positions}], Rows()],
        dataset_index=np.array([0, 1]),
        dataset_sample_index=np.array([0, 5]),
    )
    assert work_of([{"position_ids": positions}], 0) == expected
    assert work_of([{"position_ids": positions + 1, "cu_seqlens": filled}], 0) == expected
    assert work_of(blend, 0) == expected and work_of(blend, 1) == work_of(Rows(), 5)
    settings.configure(Options.make(enabled=True, mask_kinds="shared-prefix"))
    declared = Mask.shared_prefix([(4, [3, 3])])
    assert row_of([{"tokens": torch.zeros(10), KEY: declared}], 0) is declared
