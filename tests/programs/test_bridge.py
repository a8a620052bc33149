"""Recipes of Megatron Bridge with ring attention: `bash launch/test.sh --bridge`."""

import json
import os

import pytest

from launch.budget import ROOT
from tests.megatron.launch import launch

BRIDGE = ROOT / ".compat" / "bridge"
DRAWN = ["the program's own microbatches (certify takes one as microbatch=)"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BRIDGE.exists(), reason="Megatron Bridge: bash launch/test.sh --bridge"),
]


def run(folder, model, work, cp, ring, pp=1):
    """What the ranks of a recipe found."""
    job = ["-m", "tests.programs.bridge_worker", model, work, str(folder), str(ring), str(pp)]
    ended = launch(cp * pp, job, python_path=os.pathsep.join([str(BRIDGE), str(ROOT)]))
    assert ended.returncode == 0, ended.stdout[-8000:]
    found = json.loads((folder / "outcome.json").read_text())
    return found


@pytest.mark.parametrize(
    "model, work, pp",
    [
        ("qwen3", "pretrain", 1), ("qwen3", "packed", 1), ("gpt_oss", "pretrain", 1),
        ("gpt_oss", "packed", 1), ("qwen3", "packed", 2), ("gpt_oss", "pretrain", 2),
    ],
)  # fmt: skip
def test_a_recipe_trains_as_without_context_parallelism(tmp_path, monkeypatch, model, work, pp):
    """Against stock attention, which takes no packed documents on the CPU: there, against cp 1."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wanted = run(tmp_path / "1", model, work, 1, ring=int(work == "packed"))
    found = run(tmp_path / "2", model, work, 2, ring=1, pp=pp)
    losses, norms = zip(*found["steps"], strict=True)
    expected_losses, expected_norms = zip(*wanted["steps"], strict=True)
    assert len(losses) == 3 and losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    # imported and exported weights: every bit of every tensor
    assert len(found["same"]) > 20 and all(found["same"]) and all(wanted["same"])
    assert found["not covered"] == DRAWN and "gradients" in found["probes"]


@pytest.mark.parametrize("work", ["pretrain", "packed"])
def test_gpt_oss_trains_with_the_ring_beneath_its_own_classes(tmp_path, monkeypatch, work):
    """Windows on alternate layers, and learned sinks, without `enable`; cp 2 as cp 1."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    one = run(tmp_path / "1", "gpt_oss", work, 1, ring=int(work == "packed"))
    two = run(tmp_path / "2", "gpt_oss", work, 2, ring="te")
    for found, wanted in zip(two["steps"], one["steps"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert two["beneath"][-4:] == [1, 2, 1, 2] and not one["beneath"]
    assert two["not covered"] == DRAWN and {"dsink", "gradients"} <= {*two["probes"]}
    assert len(two["same"]) > 20 and all(two["same"])
