"""Layouts: positions, equal shares, balance, and agreement with other splits."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_ring.plan import Layout, Mask, Plan, PlanSpec
from cp_ring.plan import balance as balancing
from cp_ring.plan.balance import balance
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.plan.time import Conditions
from tests.plan import samples
from tests.rings import said

N, CP = 65536, 8


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_zigzag_is_the_split_of_megatron(cp, monkeypatch):
    utils = pytest.importorskip("megatron.core.utils")
    tensor = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda *args, pin_memory=False, **options: tensor(*args, **options)
    )
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x, *args, **options: x)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: cp)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)
    layout = Layout.zigzag(24 * cp, cp)
    for rank in range(cp):
        batch = {
            "tokens": torch.arange(layout.n).repeat(2, 1),
            "attention_mask": None,
            "cu_seqlens": None,
        }
        mine = utils.get_batch_on_this_cp_rank(batch, False, rank)["tokens"]
        assert mine.tolist() == [layout.positions(rank).tolist()] * 2


def test_per_document_zigzag_by_hand():
    """Of each document, rank r takes pieces r and 2 * cp - 1 - r of 2 * cp equal pieces, document
    after document.
    """
    two = Layout.per_document_zigzag([0, 8, 12], 2)
    assert two.positions(0).tolist() == [0, 1, 6, 7, 8, 11]
    assert two.positions(1).tolist() == [2, 3, 4, 5, 9, 10]
    three = Layout.per_document_zigzag([0, 6, 6, 18], 3)
    assert three.positions(0).tolist() == [0, 5, 6, 7, 16, 17]
    assert three.positions(1).tolist() == [1, 4, 8, 9, 14, 15]
    assert three.positions(2).tolist() == [2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("n", [16, 17, 23, 31, 100])
@pytest.mark.parametrize("make", [Layout.zigzag, Layout.contiguous])
def test_uneven_lengths_make_chunks_that_differ_by_one(make, n):
    layout = make(n, 8)
    assert np.ptp(np.diff(layout.edges)) <= 1
    assert sorted(np.concatenate([layout.positions(rank) for rank in range(8)]).tolist()) == list(
        range(n)
    )


@pytest.mark.parametrize("sample", [samples.log_normal, samples.one_long])
def test_balanced_is_balanced_for_20_draws(sample):
    for seed in range(20):
        mask = Mask.documents(sample(N, 1000, seed))
        layout = Layout.balanced(mask, CP)
        assert (layout.tokens_per_rank == N // CP).all()
        assert balance([(mask, 1)], layout) <= min(1.05, balance([(mask, 1)], Layout.zigzag(N, CP)))


@pytest.mark.parametrize(
    "mask", [Mask.causal(N), Mask.causal(N, (4096, 0)), Mask.full(N), Mask.full(N, (1024, 1024))]
)
def test_balanced_is_no_worse_than_zigzag_where_zigzag_is_good(mask):
    layout = Layout.balanced(mask, CP)
    for other in (Layout.zigzag(N, CP), Layout.contiguous(N, CP)):
        assert balance([(mask, 1)], layout) <= max(1.05, balance([(mask, 1)], other))
        plans = [Plan.build(mask, x) for x in (layout, other)]
        mine, its = (plan.time().both for plan in plans)
        assert mine <= 1.05 * its


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: Layout.zigzag(7, 4),
            "zigzag layout cuts the sequence into 8 chunks for cp 4, but it has 7 tokens",
        ),
        (lambda: Layout.zigzag(8, 0), "context parallel size 0 must be at least 1"),
        (
            lambda: Layout.balanced(Mask.causal(7), 8),
            "balanced layout cuts the sequence into 8 chunks for cp 8",
        ),
        (
            lambda: Layout.per_document_zigzag([0, 8, 14], 2),
            "document 1 has 6 tokens, not a multiple of 2 [*] cp = 4: pad it",
        ),
        (lambda: Layout.per_document_zigzag([0, 0], 2), "cu_seqlens_padded ends at 0"),
        (
            lambda: Layout.contiguous(8, 2).shard(torch.zeros(9), 0, 0),
            "tensor of 9 tokens in dimension 0",
        ),
        (
            lambda: Layout.zigzag(8, 2).positions(9),
            "there is no rank 9 among the 2 of the layout, 0 to 1",
        ),
        (
            lambda: Layout.zigzag(8, 2).shard(torch.zeros(8), -1, 0),
            "there is no rank -1 among the 2 of the layout, 0 to 1",
        ),
        (
            lambda: Plan.build(Mask.causal(8), Layout.zigzag(8, 2)).rank_plan(9),
            "there is no rank 9 among the 2",
        ),
        (
            lambda: PlanSpec().build_rank_plan(Mask.causal(8), 2, 2),
            "there is no rank 2 among the 2",
        ),
        (lambda: Layout.contiguous(8, 2).unshard([torch.zeros(5), torch.zeros(3)], 0), "parts of"),
        (lambda: Layout.balanced([], 2), "needs at least one mask"),
        (
            lambda: Layout.balanced([(Mask.causal(8), 1), (Mask.causal(16), 1)], 2),
            "the masks of the layers are for 8, 16 tokens",
        ),
        (
            lambda: Layout.balanced([(Mask.causal(8), 0)], 2),
            "0 layers have the mask 'causal, .* pairs': it must be at least 1",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    assert re.search(message, said(make))


MIXED = {
    "windows on 3 of 4 layers": lambda n: [(Mask.causal(n, (1024, 0)), 3), (Mask.causal(n), 1)],
    "documents with windows": lambda n: [
        (Mask.documents(offsets, window=window), layers)
        for offsets in [samples.exponential(n, 3000, 1)]
        for window, layers in [((512, 0), 5), ((-1, 0), 1)]
    ],
    "two ways and causal": lambda n: [
        (Mask.full(n, (256, 256)), 2),
        (Mask.images(n, [(100, 5000)]), 1),
    ],
}


@pytest.mark.parametrize("name", MIXED)
def test_one_layout_balances_the_sum_of_all_layers(name):
    layers = MIXED[name](16384)
    layout = Layout.balanced(layers, 4)
    work = sum(count * Plan.build(mask, layout).verify().work_per_rank for mask, count in layers)
    assert work.max() / work.mean() < 1.06 and np.ptp(layout.tokens_per_rank) == 0
    # Balanced for one of the masks, the sum of all is not better.
    for mask, _ in layers:
        single = Layout.balanced(mask, 4)
        other = sum(
            count * Plan.build(each, single).verify().work_per_rank for each, count in layers
        )
        assert work.max() <= 1.06 * other.max()


@pytest.mark.parametrize("n, cp", [(64, 2), (4096, 4), (65536, 8), (1 << 19, 64)])
def test_balanced_layout_of_a_causal_mask_is_zigzag(n, cp):
    """Megatron's own split, which scripts make of batches without documents."""
    balanced, zigzag = Layout.balanced(Mask.causal(n), cp), Layout.zigzag(n, cp)
    assert np.array_equal(balanced.edges, zigzag.edges)
    assert np.array_equal(balanced.owner, zigzag.owner)


def test_slow_links_between_nodes_are_worth_uneven_work(monkeypatch):
    """Two nodes of two ranks: even work would send most of the long document between nodes, which
    takes longer than all work of one node.
    """
    mask = Mask.documents([0, 400, 1000, 1800, 2500, 4096])
    near = Layout.balanced(mask, 4)
    assert near.name == "balanced" and balance([(mask, 1)], near) <= 1.05
    slow = Conditions(
        rates=replace(RATES, forward=4e11, backward=4e11, inside=1e9, between=2e7), node=2
    )
    monkeypatch.setattr(balancing, "Conditions", lambda: slow)
    far = Layout.balanced(mask, 4)
    assert far.name == "contiguous" and balance([(mask, 1)], far) > 1.5


def test_a_rank_alone_may_hold_one_token():
    for name in ("zigzag", "contiguous"):
        assert getattr(Layout, name)(1, 1).positions(0).tolist() == [0]


def test_a_row_that_is_nearly_all_padding_is_dealt_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout = Layout.balanced(Mask.documents([0, 30], n=4096), 4)
    assert [len(layout.positions(rank)) for rank in range(4)] == [1024] * 4
