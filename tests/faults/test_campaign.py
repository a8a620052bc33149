"""A small fault campaign: everything recovers, and the campaign would see it if not."""

import json
import random
import subprocess
import sys

import pytest

from cp_ring.megatron.checkpoints import folders, manifest
from cp_ring.testing.rank_pool import LIMIT_S
from tests.faults import __main__ as campaign
from tests.faults.jobs import resumed_well


def run(*faults):
    command = [sys.executable, "-m", "tests.faults", "--rounds", "1", "--json", "--only", *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.ci
def test_jobs_recover_from_a_kill():
    code, (entry,), _ = run("a rank killed during a save")
    assert code == 0 and entry["recovered"] == entry["rounds"] == 1, entry


@pytest.mark.slow
def test_jobs_recover_from_every_fault():
    code, entries, _ = run(*campaign.FAULTS)
    assert code == 0 and all(entry["recovered"] == entry["rounds"] for entry in entries), entries


def test_a_gap_a_repetition_and_another_loss_are_seen():
    straight = {step: 1.0 / step for step in range(1, 13)}
    assert resumed_well({4: 1 / 4, 5: 1 / 5}, 3, straight)
    assert not resumed_well({5: 1 / 5}, 3, straight)
    assert not resumed_well({3: 1 / 3, 4: 1 / 4}, 3, straight)
    assert not resumed_well({4: 1 / 4 + 1e-5}, 3, straight)
    assert not resumed_well({}, 3, straight)


def test_each_kind_of_damage_is_one(tmp_path):
    for number in (3, 6):
        folder = folders.folder_of(tmp_path, number)
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(bytes([number]) * 64)
        manifest.write(folder, {"__0_0.distcp": manifest.describe(folder / "__0_0.distcp")})
    (tmp_path / folders.TRACKER).write_text("6")
    newest = folders.folder_of(tmp_path, 6)
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    for turn in range(5):
        for name, data in whole.items():
            (newest / name).write_bytes(data)
        (tmp_path / folders.TRACKER).write_text("6")
        name, damage = campaign.damages(tmp_path, random.Random(turn))[turn]
        damage()
        assert (
            folders.tracker_is_broken(tmp_path)
            if name == "empty tracker"
            else manifest.defect(newest)
        ), name
