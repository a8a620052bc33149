"""The order of a step's batch rows: it keeps every row, and is never worse than the order as read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ring.errors import PlanError
from cp_ring.plan.packing import balanced_order, deal, imbalance, pack

STEPS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(
        st.integers(0, 50), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
    ).map(lambda work: np.array(work, np.float64).reshape(shape))
)


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_every_row_stays_in_the_step_and_nothing_becomes_longer(work):
    order = balanced_order(work)
    assert order.shape == work.shape and sorted(order.flat) == list(range(work.size))
    found, before = imbalance(work.reshape(-1)[order]), imbalance(work)
    assert found[0] <= before[0] * (1 + 1e-9) and found[1] <= before[1] * (1 + 1e-9)


def test_microbatches_and_ranks_become_equal():
    work = np.array([[[9, 8], [7, 6]], [[1, 2], [3, 4]]], np.float64)
    assert imbalance(work) == (1.7, 1.5)
    assert imbalance(work.reshape(-1)[balanced_order(work)]) == (1.0, 1.0)
    # One row a microbatch: the microbatches stay as long as they are, the ranks become equal.
    single = np.array([[[8], [4]], [[5], [1]]], np.float64)
    assert imbalance(single.reshape(-1)[balanced_order(single)])[1] == 1.0


def test_a_long_tail_is_balanced_as_far_as_its_longest_row_allows():
    work = np.random.default_rng(0).lognormal(0, 1, (4, 8, 4))
    before, after = imbalance(work), imbalance(work.reshape(-1)[balanced_order(work)])
    longest = work.max() / work.sum(2).mean()
    assert before[0] > 2 and after[0] < max(1.1, longest + 0.3) and after[1] < 1.02 < before[1]


def test_equal_rows_stay_where_they_are():
    order = balanced_order(np.ones((2, 3, 2)))
    assert order.reshape(-1).tolist() == list(range(12))


@pytest.mark.parametrize(
    "work",
    [np.ones((2, 2)), np.ones((0, 1, 1)), np.full((1, 1, 1), np.nan), np.full((1, 1, 1), -1.0)],
)
def test_bad_work_is_one_line(work):
    with pytest.raises(PlanError, match="work must be finite and not negative"):
        balanced_order(work)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from((0, 3.5, 1e4)),
)
@settings(max_examples=100, deadline=None)
def test_a_global_batch_is_dealt_out_once_and_fits(lengths, ranks, token_work):
    dealt = deal(lengths, ranks, 64, token_work)
    assert len(dealt) == ranks and len({len(mine) for mine in dealt}) == 1
    microbatches = [documents for mine in dealt for documents in mine]
    assert sorted(i for documents in microbatches for i in documents) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in documents) <= 64 for documents in microbatches)
    assert all(microbatches) or len(lengths) < len(microbatches)


def test_a_global_batch_is_dealt_out_with_equal_work():
    lengths = np.random.default_rng(0).lognormal(6, 1, 400).astype(int).clip(1, 8192)
    work = lengths * (lengths + 1) / 2
    dealt = deal(lengths, 8, 8192)
    fewest = -(-pack(lengths, 8192).rows // 8)
    assert fewest <= len(dealt[0]) <= fewest + 1
    loads = np.array([[work[documents].sum() for documents in mine] for mine in dealt])
    rank = loads.sum(1)
    assert rank.max() < max(1.03 * rank.mean(), 1.03 * work.max())
    # beside the longest document; and within the ranks that have short ones
    assert np.sort(rank)[-2] < 1.01 * np.sort(rank)[0] and (np.diff(loads) <= 0).all()
    assert (np.sort(loads.max(1) / loads.mean(1))[:3] < 1.05).all()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (([1, 2], 0, 8), "0 ranks: there must be"),
        (([1, 9], 2, 8), "document 1 has 9 tokens, more than the 8 of a row"),
        (([1, 2], 2, 8, -1.0), "token_work -1.0"),
    ],
)
def test_what_cannot_be_dealt_out_is_one_line(given, line):
    with pytest.raises(PlanError, match=line):
        deal(*given)
