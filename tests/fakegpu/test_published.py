"""The tables of signatures, to which adapters of kernels are bound in each run of the tests, against
what the package index has.
"""

from __future__ import annotations

import pytest

from tests import needs
from tests.fakegpu import published
from tests.fakegpu.build import Missing

TEXT = """
def first(q: Tensor, k=None, window: tuple[int, int] = (-1, -1), kind: str = "no_bias"): ...
def second(q, *, scale: float, exact=False): ...
def other(q): ...
"""


def test_signatures_without_annotations():
    assert published.signatures(TEXT, {"first", "second"}) == {
        "first": "q k=None window=(-1,-1) kind='no_bias'",
        "second": "q * scale exact=False",
    }


@pytest.mark.slow
@pytest.mark.parametrize("label", published.PUBLISHED)
def test_the_table_has_what_is_published(label):
    try:
        assert not published.differences(label)
    except Missing as missing:
        needs.skip_or_fail(str(missing))
