"""`cp-ring bench attention` and `host`: one small round, and what they reject."""

import pytest

from cp_ring.errors import ConfigError
from cp_ring.kernels import REGISTRY
from tests.rings import refused
from tests.tools.commands import printed, told

LINE = "bench attention --seq-length 256 --heads 2 --head-dim 16 --repeats 2"


def test_a_small_round():
    rows = told(LINE)["rows"]
    assert [row["name"] for row in rows][:2] == ["cp_ring", "one_call"]
    assert all(0 < row["min_s"] <= row["median_s"] for row in rows)


def test_a_length_that_does_not_divide():
    assert (
        refused(ConfigError, printed, f"{LINE} --cp 3")
        == "--seq-length 256: give a multiple of 2 * --cp = 6"
    )


@pytest.mark.slow
def test_the_host_has_a_row_for_each_pass():
    rows = told("bench host --repeats 1")["rows"]
    names = [(row["pass"], row["cp"]) for row in rows]
    assert names == [(name, cp) for cp in (8, 1) for name in ("forward", "backward")]
    assert all(0 < row["hop_us"] < 1e6 for row in rows) and "nothing" not in REGISTRY
