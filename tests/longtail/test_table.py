"""The table of long-tailed documents: a draw of each shape."""

import pytest

from cp_ring.plan import Layout, Mask, Plan
from tests.longtail import late
from tests.longtail.shapes import SHAPES
from tests.longtail.table import ONE, cell, ways


@pytest.mark.parametrize("name", SHAPES)
def test_one_ring_over_all_ranks_is_near_the_ideal(name):
    """And no other way is faster, by the formula and where messages wait for late peers."""
    first, *others = (cell(way, SHAPES[name], 64, 1, 1)[0] for _, way in ways())
    assert first.formula <= first.late <= 1.12 and first.microbatches == 1
    assert first.padding < 0.06
    for other in others:
        assert first.formula < other.formula and first.late < other.late


def test_late_peers_are_waited_for():
    """Where all ranks work equally long nobody is late; else the last rank is later than by its own
    sum.
    """
    for cp in (2, 8):
        even = Plan.build(Mask.full(cp * 4096), Layout.contiguous(cp * 4096, cp))
        assert late.seconds(even, ONE) == pytest.approx(even.time(ONE).both)
    mask = Mask.documents([0, 30_000, 40_000, 65_536])
    uneven = Plan.build(mask, Layout.contiguous(65_536, 8))
    assert late.seconds(uneven, ONE) >= uneven.time(ONE).both
