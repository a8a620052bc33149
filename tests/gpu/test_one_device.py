"""The peak of memory of a rank, on the CPU."""

import torch

from cp_ring import Layout, Mask, Plan
from tests.gpu.job import RankSizes
from tests.gpu.one_device import replay

SIZES = RankSizes(tokens=64, h=4, g=2, d=16, e=24, dtype=torch.float32, device="cpu")


def peaks(cp, schedule, mask=Mask.causal):
    """The allocator's peak over q, k, v, out and lse of the first rank, one in the middle, and the
    last.
    """
    n = cp * SIZES.tokens
    plan = Plan.build(mask(n), Layout.zigzag(n, cp), schedule=schedule)
    return [replay(plan, rank, SIZES) for rank in (0, cp // 2, cp - 1)]


def test_memory_does_not_grow_with_ranks():
    """The same to the byte from 8 ranks to 64; 2 ranks use one slot alone."""
    n = SIZES.tokens
    few, many = peaks(8, "ring"), peaks(64, "ring")
    assert few == many
    slot = n * SIZES.g * (SIZES.d + SIZES.e) * 4
    assert 0 <= max(many) - max(peaks(2, "ring")) < 4 * slot
    assert max(many) > 4 * slot  # it measures something


def test_memory_of_several_sources_does_not_grow_with_ranks():
    """The same to the byte as soon as two hops in succession have 4 sources: from 16 ranks on, amid
    a causal mask from 32 on.
    """
    assert peaks(16, "auto", Mask.full) == peaks(64, "auto", Mask.full)
    assert peaks(32, "auto") == peaks(64, "auto")
