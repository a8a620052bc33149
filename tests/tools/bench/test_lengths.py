"""`cp-ring bench lengths`: what each split computes and moves, and that all of them run."""

import json
import shlex
from itertools import chain

import numpy as np
import pytest
from typer.testing import CliRunner

from cp_ring.tools.bench import lengths
from cp_ring.tools.bench.lengths import LAYOUTS, PackedWork
from cp_ring.tools.cli import app

LONG = PackedWork((700, 10, 20, 30, 40, 50, 60, 114), heads=2, head_dim=16)


def test_what_each_split_computes_and_moves():
    about = {name: lengths.about(LONG, name) for name in LAYOUTS}
    assert (
        about["balanced"]["tokens"]
        == about["zigzag"]["tokens"]
        == about["independent"]["tokens"]
        == 1024
    )
    assert about["per_document_zigzag"]["tokens"] == sum(-(-n // 8) * 8 for n in LONG.lengths)
    assert (
        about["balanced"]["balance"]
        < 1.1
        < about["zigzag"]["balance"]
        < about["independent"]["balance"]
    )
    assert about["dynamic"]["tokens"] == about["per_document_zigzag"]["tokens"]
    assert 0 < about["dynamic"]["bytes"] < about["per_document_zigzag"]["bytes"]
    assert about["independent"]["bytes"] == 0 < about["balanced"]["bytes"]
    assert sorted(chain(*lengths.greedy(LONG))) == sorted(LONG.lengths)
    assert lengths.greedy(LONG)[0] == [700]


def test_the_default_lengths_have_one_long_document():
    drawn = lengths.long_tail(8192, 0)
    assert drawn.sum() == 8192 and 2048 <= drawn.max() <= 6144 and np.median(drawn) < 100


def test_command():
    small = shlex.split("--seq-length 1K --heads 1 --head-dim 8 --repeats 1 --json")
    found = CliRunner().invoke(app, ["bench", "lengths", *small])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout.splitlines()[-1])["rows"]
    assert [row["layout"] for row in rows] == list(LAYOUTS)
    assert all(
        {"median_s", "cpu_s", "tokens", "balance", "bytes"} <= row.keys() and row["median_s"] > 0
        for row in rows
    )


@pytest.mark.parametrize(
    ("options", "line"), [(["--seq-length", "100"], "4 ranks need at least 512 tokens")]
)
def test_bad_sizes_are_one_line(options, line):
    found = CliRunner().invoke(app, ["bench", "lengths", *options])
    assert line in str(found.exception)
