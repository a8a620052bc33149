"""`cp-ring bench recurrent`: both ways compute the same, and send the bytes that are planned."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.tools.bench.recurrent_ways import DeltaNet, run
from cp_ring.tools.cli import app


def check(results) -> None:
    for found in results:
        assert found["bytes"] == found["planned_bytes"] > 0
        assert found["difference"] < 1e-6 and len(found["times"]) == 1


def test_both_ways_agree_and_send_what_is_planned(pool):
    results = run([DeltaNet(256, cp, 4, 8, 16) for cp in (2, 4)], 1, pool)
    assert [(found["way"], found["cp"]) for found in results] == [
        ("heads", 2), ("states", 2), ("heads", 4), ("states", 4),
    ]  # fmt: skip
    check(results)


@pytest.mark.ci
def test_states_are_a_twentieth_of_the_exchange_at_16384_tokens(pool):
    """Heads of the size of Qwen3-Next's, as many as one of 8 tensor-parallel ranks has."""
    heads, states = run([DeltaNet(16_384, 4, 4, 128, 128)], 1, pool)
    check([heads, states])
    # bfloat16 would halve the exchange, and no state
    assert states["bytes"] * 20 < heads["bytes"] / 2


@pytest.mark.parametrize("line", [["--seq-length", "12"], ["--heads", "6"]])
def test_bad_sizes(line):
    error = CliRunner().invoke(app, ["bench", "recurrent", *line]).exception
    assert isinstance(error, ConfigError) and str(error).startswith(" ".join(line))
