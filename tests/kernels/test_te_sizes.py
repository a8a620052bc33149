"""Packed calls of a training run with packed documents have few sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_ring import Mask, PlanSpec
from cp_ring.kernels import flash, flash_aten, reference
from cp_ring.kernels import te_sizes as sizes
from cp_ring.kernels.base import SizedVarlen
from cp_ring.kernels.packed import PackedCall
from cp_ring.kernels.transformer_engine import KERNEL
from cp_ring.kernels.work import kernel_calls
from tests.plan.samples import log_normal

TOKENS = st.integers(1, 1 << 20)


def class_of(tokens):
    """The number of tokens for which TransformerEngine builds the graph that it uses for so many."""
    power = 1 << math.ceil(math.log2(tokens))
    return max(power, 1024) if power <= 32768 else math.ceil(tokens / 32768) * 32768


@given(TOKENS, TOKENS, TOKENS)
def test_a_call_that_is_filled_up_has_the_class_of_its_size(queries, keys, shard):
    for tokens, size in zip(
        (queries := min(queries, shard), keys), sizes.sizes_of(queries, keys, shard), strict=True
    ):
        filled = max(tokens, sizes.tokens_of(size))
        assert tokens <= filled <= size == class_of(filled)


@given(st.integers(1, 5000))
def test_tiles(count):
    filled = sizes.tiles_of(count)
    assert count <= filled <= max(2 * count - 1, 16) and filled & (filled - 1) == 0


def test_packed_calls_of_no_other_kernel_are_filled():
    assert isinstance(KERNEL, SizedVarlen)
    for other in (flash.KERNEL, flash_aten.KERNEL, reference.KERNEL):
        assert not isinstance(other, SizedVarlen), other.name


def calls_of(plan):
    sizes = KERNEL.call_sizes(plan.num_tokens, plan.packed)
    return [call for hop in plan.hops for call in kernel_calls(hop, KERNEL.capabilities, sizes)]


@pytest.mark.parametrize("layout, most", [("zigzag", 10), ("balanced", 20)])
def test_a_hundred_microbatches_have_few_graphs(layout, most):
    n, cp, rank = 32768, 4, 1
    graphs, unfilled = set(), set()
    for seed in range(100):
        mask = Mask.documents(log_normal(n, 2000, seed, sigma=1.5))
        plan = PlanSpec(layout).build_rank_plan(mask, cp, rank)
        for call in calls_of(plan):
            if isinstance(call, PackedCall):
                counts = [
                    max(side.count, sizes.tokens_of(side.longest)) for side in (call.q, call.k)
                ]
                graphs.add((len(call.q.ends.values), *map(class_of, counts), call.right))
                unfilled.add(
                    (
                        len(set(call.q.ends.values)),
                        class_of(call.q.count),
                        class_of(call.k.count),
                        call.right,
                    )
                )
            else:
                graphs.add((call.q.stop - call.q.start, call.k.stop - call.k.start, call.hi))
    assert len(graphs) <= most < len(unfilled), sorted(graphs)


@pytest.mark.parametrize("n, packed", [(4096, False), (4000, True)])
def test_uneven_tiles_are_packed_and_even_ones_are_not(n, packed):
    plan = PlanSpec().build_rank_plan(Mask.causal(n), 2, 1)
    calls = calls_of(plan)
    assert len(calls) >= 2 and all(isinstance(call, PackedCall) == packed for call in calls)
