"""One job at a time writes to a folder of checkpoints, and a job that was killed does not block its
successor.
"""

import json
import multiprocessing as mp
import os
import shlex
import shutil
import signal
import time

import pytest
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, lock, manifest
from cp_ring.testing.rank_pool import LIMIT_S
from tests.megatron.launch import attempt


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short waits; no lock outlives a test."""
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "STALE_S", 0.2)
    yield
    lock.release_all()


def write(folder, **values):
    """The lock of an owner on another machine, with `values` changed."""
    owner = lock.Owner(
        token="0123456789abcdef", host="elsewhere", machine="another", pid=1, started="1"
    )
    (folder / lock.NAME).write_text(json.dumps(owner.model_copy(update=values).model_dump()))


def hold(folder, ready):
    lock.acquire(folder)
    ready.set()
    signal.pause()


@pytest.fixture
def other(tmp_path):
    """A process of this machine that holds the lock of `tmp_path`."""
    context = mp.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(LIMIT_S)
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_rejected_in_one_line(tmp_path, other):
    with pytest.raises(ConfigError) as stop:
        lock.acquire(tmp_path)
    line = str(stop.value)
    assert (
        line.startswith(f"--save {tmp_path}: another job writes its checkpoints there (")
        and "\n" not in line
    )
    assert f"process {other.pid} on " in line and lock.held(tmp_path) is None


def test_a_folder_that_was_removed_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE_S", 1800)
    folder = tmp_path / "saves"
    taken = lock.acquire(folder)
    shutil.rmtree(folder)
    assert lock.acquire(folder) is taken
    assert lock._read(folder / lock.NAME) == taken.owner


def test_a_stopped_job_keeps_its_lock(tmp_path, other):
    os.kill(other.pid, signal.SIGSTOP)
    os.utime(tmp_path / lock.NAME, (0, 0))  # no sign of life for very long
    with pytest.raises(ConfigError, match="another job"):
        lock.acquire(tmp_path)


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock, "STALE_S", 1e9)
    dead = lock._read(tmp_path / lock.NAME)
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead too
    taken = lock.acquire(tmp_path)
    assert taken.tokens == {taken.owner.token, dead.token}


@pytest.mark.parametrize(("theirs", "ours", "free"), [(0, 1, True), (1, 1, False), (2, 1, False)])
def test_a_job_that_slurm_has_restarted_takes_over_at_once(
    tmp_path, monkeypatch, theirs, ours, free
):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(ours))
    write(tmp_path, slurm_job="77", slurm_restart=theirs)
    found = lock._read(tmp_path / lock.NAME).fate(lock.Owner.this_process())
    assert found == ("dead" if free else "unknown")
    if free:
        monkeypatch.setattr(lock, "STALE_S", 1e9)
        assert lock.acquire(tmp_path).owner.slurm_restart == ours


def test_a_lock_without_a_sign_of_life_is_taken_over(tmp_path):
    write(tmp_path)
    assert "0123456789abcdef" in lock.acquire(tmp_path).tokens


def test_a_lock_that_is_renewed_is_not(tmp_path, monkeypatch):
    write(tmp_path)
    os.utime(tmp_path / lock.NAME, (0, 0))
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.utime(tmp_path / lock.NAME))
    with pytest.raises(ConfigError, match="another job"):
        lock.acquire(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"token": 1}', '{"a":' * 9999, "\x00"])
def test_a_file_that_is_no_lock_counts_as_silent(tmp_path, text):
    (tmp_path / lock.NAME).write_text(text)
    taken = lock.acquire(tmp_path)
    assert taken.tokens == {taken.owner.token}


def test_the_lock_is_renewed_and_given_up(tmp_path):
    held = lock.acquire(tmp_path)
    os.utime(held.path, (0, 0))
    deadline = time.monotonic() + LIMIT_S
    while held.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lock.acquire(tmp_path) is held
    lock.release_all()
    assert not list(tmp_path.iterdir())


def test_a_job_notices_that_its_lock_is_lost_and_takes_one_back_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE_S", 1800)
    held = lock.acquire(tmp_path)
    held.path.unlink()
    assert lock.acquire(tmp_path) is held and held.path.exists()
    write(tmp_path)
    with pytest.raises(lock.Lost, match="now belongs to another job"):
        lock.acquire(tmp_path)
    lock.release_all()
    assert (tmp_path / lock.NAME).exists()  # the other's


def test_a_job_that_was_stopped_does_not_take_back_the_lock_that_its_successor_has_given_up(
    tmp_path,
):
    """It would write its older checkpoints over those of the successor, and the tracker would name
    them.
    """
    held = lock.acquire(tmp_path)
    held._stop.set()  # as a stopped process it renews nothing
    held.path.unlink()
    held._renewed -= 2 * lock.STALE_S
    with pytest.raises(lock.Lost, match="did not run for more than"):
        lock.acquire(tmp_path)
    assert not held.path.exists()


def test_a_job_that_was_stopped_writes_nothing_into_the_folder_of_its_successor(tmp_path):
    """It was stopped between the beginning of a save and its end, and the lock was looked at
    before.
    """
    held, final = lock.acquire(tmp_path), folders.folder_of(tmp_path, 2)
    folder = folders.unfinished(final, held.owner.token)
    checkpoint(folder)
    write(tmp_path)
    (tmp_path / folders.TRACKER).write_text("8")
    with pytest.raises(lock.Lost, match="now belongs to another job"):
        folders.publish(folder, final, held)
    told = []
    with folders.open_tracker(
        str(tmp_path / folders.TRACKER), "w", lambda *outcome: told.append(outcome)
    ) as file:
        file.write("2")
    assert folders.published(tmp_path) == [] and folders.tracked(tmp_path) == 8
    ((iteration, error),) = told
    assert iteration is None and isinstance(error, lock.Lost)


def test_a_job_that_was_stopped_after_it_looked_at_its_lock_changes_nothing(tmp_path, monkeypatch):
    """Its successor has removed its remains and saved meanwhile."""
    held, final = lock.acquire(tmp_path), folders.folder_of(tmp_path, 2)
    folder = folders.unfinished(final, held.owner.token)
    checkpoint(folder)

    def stopped(_):
        folders.sweep(tmp_path, held.tokens)
        (tmp_path / folders.TRACKER).write_text("8")
        if not final.exists():
            checkpoint(final)

    monkeypatch.setattr(lock.Lock, "check", stopped)
    with pytest.raises(FileNotFoundError):
        folders.publish(folder, final, held)
    with pytest.raises(FileNotFoundError):
        folders.replace_tracker(tmp_path, "2")
    assert not manifest.defect(final) and folders.tracked(tmp_path) == 8


def test_of_two_successors_one_gets_the_lock(tmp_path):
    """The slower one has seen the dead owner too, and removes the lock only if it is still the dead
    owner's.
    """
    write(tmp_path)
    dead = lock._read(tmp_path / lock.NAME)
    quicker = lock.acquire(tmp_path)
    lock._remove(tmp_path / lock.NAME, dead)
    assert lock._read(tmp_path / lock.NAME).token == quicker.owner.token


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def link(*args):
        raise OSError(lock.errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    held = lock.acquire(tmp_path)
    assert lock._read(held.path) == held.owner and not lock._create(held.path, held.owner)


def checkpoint(folder):
    folder.mkdir()
    (folder / "a").write_bytes(b"abc")
    manifest.write(folder, {"a": manifest.describe(folder / "a")})


def test_a_save_counts_only_once_the_folder_is_seen_whole_under_its_name(tmp_path, monkeypatch):
    final, folder = (
        folders.folder_of(tmp_path, 2),
        folders.unfinished(folders.folder_of(tmp_path, 2), "ab"),
    )
    checkpoint(final)
    checkpoint(folder)
    rename = type(folder).rename

    def spoiled(path, target):
        rename(path, target)
        if path == folder:
            (target / "a").unlink()

    monkeypatch.setattr(type(folder), "rename", spoiled)
    with pytest.raises(OSError, match=r"is not what was published: .* is missing"):
        folders.publish(folder, final, lock.acquire(tmp_path))
    # the one before is back
    assert manifest.defect(final) == "" and folders.published(tmp_path) == [2]


def test_temporary_names_cannot_be_predicted(tmp_path):
    """A link at the old temporary name let whoever can write to the folder choose which file is
    overwritten.
    """
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in (folders.TRACKER, manifest.NAME):
        (tmp_path / f"{name}.next").symlink_to(victim)
    manifest.write(tmp_path, {"a": {"size": 0, "crc32": "00000000"}})
    with folders.open_tracker(
        str(tmp_path / folders.TRACKER), "w", lambda iteration, error: None
    ) as file:
        file.write("20")
    assert victim.read_text() == "kept" and folders.tracked(tmp_path) == 20


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
def test_the_second_of_two_jobs_ends_before_it_trains(tmp_path, monkeypatch):
    """The lock is held by this process; both jobs used to report success, and each lost its
    checkpoints to the other.
    """
    monkeypatch.undo()
    saves = tmp_path / "saves"
    held = lock.acquire(saves)
    running = folders.unfinished(folders.folder_of(saves, 2), held.owner.token)
    running.mkdir()
    flags = shlex.split(
        "--cp-ring --cp-ring-cpu --context-parallel-size 2 --train-iters 2 --save-interval 1"
    )
    done = attempt(2, "second", [*flags, "--save", str(saves), "--load", str(saves)], tmp_path)
    assert (
        done.code == 2
        and f"--save {saves}: another job writes its checkpoints there" in done.rejected
    )
    assert sorted(saves.iterdir()) == sorted([held.path, running]) and not done.losses


def test_the_watchdog_pauses_during_a_save():
    """So a synchronous save may take longer than the hop timeout."""
    from cp_ring.megatron.checkpoints import saving
    from cp_ring.observe.watchdog import WATCH

    seen = []
    saving.guarded(lambda iteration: seen.append((iteration, WATCH.pauses)))(7)
    saving.guarded_finalize(lambda: seen.append(("finalize", WATCH.pauses)))()
    assert seen == [(7, 1), ("finalize", 1)] and WATCH.pauses == 0
