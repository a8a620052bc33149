"""The order of a step's batch rows: it keeps every row, and is never worse than the order as read."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ring.megatron.data.packing import balanced_order, imbalance

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
