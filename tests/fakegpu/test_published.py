"""The tables of signatures, to which adapters of kernels are bound in each run of the tests, against
what the package index has.
"""

from __future__ import annotations

import pytest

from cp_ring.kernels import flash
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


def text_of(*wanted):
    try:
        return published.source(*wanted)
    except Missing as missing:
        needs.skip_or_fail(str(missing))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.7.4", "2.8.3"])
def test_limits_of_flash_attn_3(version):
    """Heads up to 256, on Ampere and Hopper alone."""
    text = text_of(f"flash-attn=={version}.*", "hopper/generate_kernels.py")
    capabilities, sizes = published.constants(text, "SM", "HEAD_DIMENSIONS")
    assert max(sizes) == 256
    assert {x // 10 for x in capabilities} == set(flash._GENERATIONS["3"])


@pytest.mark.slow
def test_limits_of_flash_attn_4():
    _, package, path = published.PUBLISHED["4: flash-attn 4.0.0b36"]
    check = published.function(text_of(package, path), "_validate_head_dims")
    for generation in (9, 10, 11):
        for sizes in [(x, x) for x in range(8, 129, 8)] + [(192, 128)]:
            check(*sizes, generation, 8)
    with pytest.raises(AssertionError, match="SM100"):
        check(136, 136, 10, 8)
