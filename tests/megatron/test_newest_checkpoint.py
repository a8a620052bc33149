"""Jobs resume from the newest whole checkpoint, and a line tells what is passed over."""

import argparse
import json
import pickle
import random
import sys

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from cp_ring.megatron import newest_checkpoint
from cp_ring.megatron.newest_checkpoint import TRACKER, find, newest_whole
from tests.megatron import kills
from tests.megatron.launch import RING, attempt, trace, train


def write_checkpoint(folder, size=100):
    """A folder with the files of a torch_dist checkpoint, of which `__0_0.distcp` should hold 100
    bytes.
    """
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    stored = {
        MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, 60),
        MetadataIndex("b"): _StorageInfo("__0_0.distcp", 60, 40),
    }
    (folder / ".metadata").write_bytes(
        pickle.dumps(Metadata(state_dict_metadata={}, storage_data=stored))
    )
    (folder / "__0_0.distcp").write_bytes(bytes(size))


@pytest.fixture
def saves(tmp_path, monkeypatch):
    """Checkpoints of iterations 20, 40 and 60, and the tracker of the last."""
    for step in (20, 40, 60):
        write_checkpoint(tmp_path / f"iter_{step:07d}")
    (tmp_path / TRACKER).write_text("60")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    return tmp_path


def read(folder, stock=lambda tracker: (60, False)):
    return newest_whole(stock, str(folder / TRACKER))


def cut(path, kept):
    path.write_bytes(path.read_bytes()[:kept])


DAMAGES = {
    "cut shard": lambda last: cut(last / "__0_0.distcp", 99),
    "no shard": lambda last: (last / "__0_0.distcp").unlink(),
    "no index": lambda last: (last / ".metadata").unlink(),
    "cut index": lambda last: cut(last / ".metadata", 50),
    "empty index": lambda last: cut(last / ".metadata", 0),
    "no metadata.json": lambda last: (last / "metadata.json").unlink(),
    "empty metadata.json": lambda last: cut(last / "metadata.json", 0),
    "no folder": lambda last: last.rename(last.with_name("aside")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_passed_over_in_one_line(saves, capsys, damage):
    DAMAGES[damage](saves / "iter_0000060")
    before = sorted(saves.rglob("*"))
    assert read(saves) == read(saves) == (40, False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cp_ring: passing over the checkpoint of iteration 60 (")
    assert line.endswith("): resuming from iteration 40")
    assert sorted(saves.rglob("*")) == before


def test_a_whole_checkpoint_is_taken_in_silence_and_a_newer_unfinished_one_is_not_seen(
    saves, capsys
):
    write_checkpoint(saves / "iter_0000080", size=10)
    assert read(saves) == (60, False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", "6o", "\0"])
def test_a_tracker_that_a_kill_has_emptied_does_not_end_the_job(saves, capsys, text):
    (saves / TRACKER).write_text(text)
    assert read(saves) == (60, False)
    assert "resuming from iteration 60" in capsys.readouterr().out


def test_what_names_its_iteration_is_left_to_megatron(saves, monkeypatch):
    cut(saves / "iter_0000060" / ".metadata", 0)
    for argv in (["--ckpt-step", "60"], ["--ckpt-step=60"]):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *argv])
        assert read(saves) == (60, False)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    (saves / TRACKER).write_text("release")
    assert read(saves, stock=lambda tracker: (0, True)) == (0, True)


def test_a_checkpoint_of_the_old_format_is_taken_as_it_is(saves):
    (saves / "iter_0000070" / "mp_rank_00").mkdir(parents=True)
    (saves / TRACKER).write_text("70")
    assert find(saves) == (70, "")


def test_where_none_is_whole_the_job_ends_in_one_line(saves, capsys):
    for folder in saves.glob("iter_*"):
        cut(folder / "__0_0.distcp", 1)
    with pytest.raises(SystemExit):
        read(saves)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cp_ring: error: --load {saves}: no checkpoint in it is whole (")
    assert "__0_0.distcp holds 1 of 100 bytes" in line


@pytest.mark.parametrize("name", ["iter_0000060_v1", "iter_0000060_2", "iter_60", "iter_best_1"])
def test_a_copy_that_somebody_keeps_is_no_checkpoint_of_the_job(saves, capsys, name):
    write_checkpoint(saves / name)
    assert read(saves) == (60, False)
    (saves / TRACKER).write_text("")
    assert read(saves) == (60, False) and "iteration 60" in capsys.readouterr().out


@pytest.mark.parametrize("own", [None, "elsewhere"])
def test_without_a_whole_one_beside_megatron_takes_that_of_load(saves, capsys, monkeypatch, own):
    beside = saves / (own or "non_persistent")
    write_checkpoint(beside / "iter_0000070", size=10)
    (beside / TRACKER).write_text("70")
    args = argparse.Namespace(
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=own and str(beside),
        load=str(saves),
    )
    monkeypatch.setattr(newest_checkpoint, "arguments", lambda: args)
    assert read(beside) == (-1, False) and read(saves) == (60, False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cp_ring: passing over the checkpoint of iteration 70 (")


RERUN = 16  # the exit code with which Megatron's rerun machine asks for another start


@pytest.mark.ci
def test_a_job_that_a_nan_has_stopped_starts_again_from_what_megatron_saved(tmp_path):
    """The rerun machine saves a checkpoint that holds its own state, over the one of the step
    before.
    """
    saves = ["--save", str(tmp_path / "saves"), "--load", str(tmp_path / "saves")]
    job = [*RING, *saves, "--save-interval", "1", "--train-iters", "4", "--lr", "1e30"]
    for name in ("stopped", "again"):
        done = attempt(2, name, job, tmp_path)
        assert done.code == RERUN, done.output
        assert f"cp_ring: error: rank 0: training ended with exit code {RERUN}" in done.output
    assert "at iteration 1" in done.output and "rescheduled on the same GPU" in done.output
    goes_on = ["--rerun-mode", "disabled", "--no-check-for-nan-in-loss-and-grad"]
    train(2, {"on": [*job, *goes_on]}, tmp_path)
    assert list(trace(tmp_path, "on")) == [2, 3, 4]


@pytest.mark.ci
def test_a_job_that_is_killed_in_its_saves_resumes(tmp_path):
    (outcome,) = kills.run(tmp_path, 1, random.Random(0), [])
    assert outcome.problem == ""


def test_a_tracker_alone_is_all_that_a_frozen_job_has_written(tmp_path):
    (tmp_path / TRACKER).write_text("40\n")
    assert find(tmp_path) == (40, "")
