"""Makes Megatron's save safe: written aside, checked, given a manifest, and published all at once
by all ranks or by none.

A save that fails on any rank (a full disk, a read-only folder) is reported in one line, removes
what it has written, and lets training go on; where it was the last save of a run, the run ends with
an error. One job at a time saves to a folder (`lock`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files, folders, lock, manifest
from cp_ring.megatron.checkpoints.writers import SUMS
from cp_ring.megatron.rejection import reject, rejecting
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, around
from cp_ring.observe import watchdog
from cp_ring.runtime import RUNTIME

_SHARD = re.compile(r".*?__(\d+)_\d+\.distcp")


class SaveFailed(RuntimeError):
    """A checkpoint was not saved: (iteration, reason). All ranks raise it together."""


class _State:
    """The state of this process.

    guarding: whether a guarded save is starting.
    errors: what went wrong on this rank in the save that is starting.
    unsaved: the iteration of the last save, if it failed.
    last: the folder that was published last.
    writing: unfinished folders of saves that still run; there are several where saving is
    asynchronous.
    """

    guarding = False
    unsaved: int | None = None
    last: Path | None = None
    errors: list[str]
    writing: set[Path]

    def __init__(self) -> None:
        self.errors, self.writing = [], set()


_state = RUNTIME.keep(_State())


def guarding() -> bool:
    """Whether a guarded save is starting."""
    return _state.guarding


def all_ranks_agree(ok: bool) -> bool:
    """Whether `ok` holds on every rank; all ranks call it."""
    flag = torch.tensor(int(ok), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def on_rank_0[T](act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, on all ranks; all of them raise the `OSError` or `ConfigError`
    that it raises. All ranks call it.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except (OSError, ConfigError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast(T, result)


@contextlib.contextmanager
def failing(final: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Errors that all ranks meet in the block become a `SaveFailed` of the checkpoint `final`:
    those of `on_rank_0`, or of torch where `unfinished` is written, which is then removed.
    """
    kinds = (OSError, ConfigError) if unfinished is None else (CheckpointException,)
    try:
        yield
    except kinds as error:
        if unfinished is not None:
            drop(unfinished)
        raise SaveFailed(folders.iteration_of(final), reason(error)) from None


# The lock.


@around
def locked(set_up: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `setup_model_and_optimizer`, before which the job takes the lock of --save, or
    ends with one line.
    """
    from megatron.training.global_vars import get_args

    save = getattr(get_args(), "save", None)
    if save and "://" not in str(save):
        # an unwritable folder is reported at each save
        with rejecting(), contextlib.suppress(OSError):
            take_lock(Path(save))
    return set_up(*args, **kwargs)


def take_lock(folder: Path) -> None:
    """Rank 0 takes the lock of `folder`; all ranks call it.

    Raises `ConfigError` on all ranks where another job holds it, `OSError` where the folder cannot
    be written to.
    """

    def take() -> None:
        lock.acquire(folder)

    on_rank_0(take)


# Megatron's functions.


@around
def tolerant(write: Function, *args: Any, **kwargs: Any) -> Any:
    """`write`, which one rank runs while others wait in a collective: its failure is kept for
    `publish`, where all ranks meet.
    """
    try:
        return write(*args, **kwargs)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        _state.errors.append(reason(error))


@around
def leave_out_folder(ensure: Function, filename: str, check_parent: bool = True) -> None:
    """Megatron's `ensure_directory_exists`, which does not make the final folder of a checkpoint
    that is written aside.
    """
    if check_parent or not _state.guarding:
        ensure(filename, check_parent)


@around
def guarded(save_checkpoint: Function, iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `save_checkpoint`, after which training goes on where the checkpoint could not be
    saved.
    """
    _state.guarding = True
    try:
        with watchdog.paused():
            save_checkpoint(iteration, *args, **kwargs)
    except (SaveFailed, CheckpointException) as error:
        _report(iteration, reason(error))
    finally:
        _state.guarding = False


@around
def guarded_finalize(finalize: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `maybe_finalize_async_save`, which goes on with the next request where one could
    not be saved.
    """
    while True:
        try:
            with watchdog.paused():
                return finalize(*args, **kwargs)
        except SaveFailed as error:  # the request that failed is out of Megatron's queue
            iteration, why = error.args
            _report(iteration, why)


@around
def written_aside(
    save: Function, state: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """`dist_checkpointing.save`, which writes aside and publishes within `guarded`, and is as it
    was elsewhere.
    """
    final = Path(checkpoint_dir)
    if not _state.guarding or "://" in str(checkpoint_dir):
        return save(state, checkpoint_dir, *args, **kwargs)
    folder = make_unfinished(final)
    with failing(final, folder):
        request = save(state, str(folder), *args, **kwargs)
    if request is None:
        publish(folder, final)
        return None
    request.finalize_fns[:] = [failing(final, folder)(step) for step in request.finalize_fns]
    request.finalize_fns.append(functools.partial(publish, folder, final, tuple(_state.errors)))
    _state.errors.clear()  # the next save may begin before this one ends
    return request


def make_unfinished(final: Path) -> Path:
    """Makes the folder in which the checkpoint `final` is written; all ranks learn its name.

    Raises `SaveFailed` on all ranks where rank 0 cannot make it or another job has the lock.
    """

    def make() -> Path:
        held = lock.acquire(final.parent)
        folder = folders.unfinished(final, held.owner.token)
        try:
            folders.prepare(folder, final, held.tokens, _state.writing)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    with failing(final):
        folder = on_rank_0(make)
    _state.errors.clear()
    _state.writing.add(folder)
    return folder


def publish(folder: Path, final: Path, earlier: tuple[str, ...] = ()) -> None:
    """Checks and publishes what all ranks have written to `folder`; Megatron then writes the
    tracker.

    earlier: errors of this rank from when the save began.

    Raises `SaveFailed` on all ranks where anything went wrong on any.
    """
    rank, errors = dist.get_rank(), [*earlier, *_state.errors]
    _state.errors.clear()
    try:
        if not errors:
            _complete_sums(folder, rank)
    except OSError as error:
        errors.append(reason(error))
    good = all_ranks_agree(not errors)
    if good and rank == 0:
        try:
            held = lock.acquire(final.parent)
            _write_manifest(folder)
            folders.publish(folder, final, held)
        except (OSError, ValueError) as error:
            errors.append(reason(error))
    if not good or not all_ranks_agree(not errors):
        if errors and rank:
            print(f"cp_ring: rank {rank}: {errors[0]}", file=sys.stderr, flush=True)
        why = errors[0] if errors else "a rank could not write its part"
        drop(folder)
        raise SaveFailed(folders.iteration_of(final), why)
    _state.writing.discard(folder)
    _state.unsaved, _state.last = None, final


def track(folder: Path, iteration: int) -> None:
    """Lets the tracker file of `folder` name the published checkpoint of `iteration`, and removes
    those that are not kept.

    All ranks call it. Raises `SaveFailed` on all of them where rank 0 cannot.
    """

    def replace() -> None:
        held = lock.acquire(folder)
        folders.replace_tracker(folder, str(iteration))
        folders.prune(folder, iteration, current().keep_checkpoints, held.owner.token)

    with failing(folders.folder_of(folder, iteration)):
        on_rank_0(replace)


def drop(folder: Path) -> None:
    """Removes the unfinished checkpoint `folder`."""
    _state.writing.discard(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _complete_sums(folder: Path, rank: int) -> None:
    """Leaves the checksums of this rank's files beside them, unless the writer has."""
    place = folder / SUMS.format(rank)
    if place.is_file():
        return
    mine = [
        path
        for path in folder.glob("*.distcp")
        if (match := _SHARD.fullmatch(path.name)) and int(match[1]) == rank
    ]
    if mine:
        place.write_text(json.dumps({path.name: manifest.describe(path) for path in mine}))


def _write_manifest(folder: Path) -> None:
    """Merges the checksums of all ranks into the manifest, after checking that the files are whole.

    Raises `ValueError` or `OSError` where they are not.
    """
    from cp_ring.megatron.checkpoints import inspection

    problem = inspection.structure_defect(folder)
    if problem:
        raise ValueError(problem)
    sums: dict[str, manifest.Entry] = {}
    for path in sorted(folder.glob(SUMS.format("*"))):
        sums |= files.read_json(path)
        path.unlink()
    for path in folder.iterdir():
        if path.is_file() and path.name not in sums:
            sums[path.name] = manifest.describe(path)
    for name, entry in sums.items():
        length = (folder / name).stat().st_size
        if length != entry["size"]:
            raise ValueError(f"{folder / name} holds {length} of {entry['size']} bytes")
    manifest.write(folder, sums)


# Reports.


def _report(iteration: int, why: str) -> None:
    """Says on rank 0 that a checkpoint is missing, and what is left."""
    from megatron.training.global_vars import get_args

    _state.unsaved = iteration
    which = f"of iteration {iteration} " if iteration >= 0 else ""
    if dist.get_rank() == 0:
        good = folders.last_good(get_args().save)
        left = (
            "there is none yet"
            if good is None
            else f"the last good one is that of iteration {good}"
        )
        print(
            f"cp_ring: warning: the checkpoint {which}was not saved: {why}; {left}; the next save "
            "tries again",
            file=sys.stderr,
            flush=True,
        )


def _tracker_written(folder: Path, iteration: int | None, error: OSError | None) -> None:
    """After rank 0 has tried to replace the tracker: without it the next restart misses the
    checkpoint, which is in place.
    """
    if error is not None:
        _report(-1, f"the tracker was not replaced: {reason(error)}")
        return
    held = lock.held(folder)
    if iteration is not None and held is not None:
        folders.prune(folder, iteration, current().keep_checkpoints, held.owner.token)


@contextlib.contextmanager
def saves_reported_at_exit() -> Iterator[None]:
    """A run whose last save failed ends with one line and exit code 1, though training itself ended
    well; gives up its locks.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code or not _lost():
            raise
    finally:
        lock.release_all()
    why = _lost()
    if why:
        reject(why, code=1)


def _lost() -> str:
    """Why the run has no checkpoint of its last save, or "" where it has one, or has not saved."""
    if _state.unsaved is not None:
        return "the last checkpoint of this run was not saved: see the warning above"
    if os.environ.get("RANK", "0") == "0" and _state.last is not None and not _state.last.is_dir():
        return f"the last checkpoint of this run is gone: something else has removed {_state.last}"
    return ""


def reason(error: BaseException) -> str:
    """One line that says why."""
    if isinstance(error, SaveFailed):
        return str(error.args[-1])
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {reason(inner)}"
    if failures == {}:
        return "another rank could not write"
    text = str(error).strip().splitlines()
    return text[-1] if text else type(error).__name__


class Opener:
    """Stands for Megatron's way to open files: tracker files are published by a rename, all others
    as before.

    Has every other attribute of `original`, and is itself callable where that is.
    """

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return self._open(self._original.open, path, mode, *rest, **named)

    def __call__(self, path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return self._open(self._original, path, mode, *rest, **named)

    def _open(
        self, plain: Callable[..., Any], path: Any, mode: str, *rest: Any, **named: Any
    ) -> Any:
        if not folders.is_tracker(path) or (
            mode == "r" and not folders.tracker_is_broken(Path(os.path.dirname(path)))
        ):
            return plain(path, mode, *rest, **named)
        return folders.open_tracker(
            path, mode, functools.partial(_tracker_written, Path(path).parent)
        )
