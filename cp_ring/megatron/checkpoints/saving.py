"""Megatron's save, made safe: written aside, checked, given a manifest, and published all at once by all ranks or by none.

A save that fails on any rank (a full disk, a read-only folder) is reported in one line, removes what it had written, and lets
training go on; where it was the last one of a run, the run ends with an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron.checkpoints import folders, manifest
from cp_ring.megatron.settings import current

_SHARD = re.compile(r".*?__(\d+)_\d+\.distcp")
_SUMS = ".sums.{}.json"


class SaveFailed(RuntimeError):
    """A checkpoint was not saved; raised on all ranks alike."""


class _State:
    """Of this process: whether a guarded save is starting, what went wrong on this rank, which save failed last."""

    guarding = False
    errors: list[str]
    unsaved: int | None = None
    results: Any = None  # where writers in other processes leave theirs
    writing: set[Path]  # folders aside of saves that have begun and not ended; there are several where saving is asynchronous

    def __init__(self) -> None:
        self.errors, self.writing = [], set()


_state = _State()


def agree(ok: bool) -> bool:
    """Whether `ok` holds on every rank; all ranks call it."""
    flag = torch.tensor(int(ok), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def tolerant(write: Callable[..., Any]) -> Callable[..., Any]:
    """`write`, run by one rank while others wait in a collective: its failure is kept for `_publish`, where all ranks meet."""

    @functools.wraps(write)
    def tolerated(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            _state.errors.append(reason(error))

    return tolerated


def leave_out_folder(ensure: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `ensure_directory_exists`, which need not make the folder of a checkpoint that is written aside."""

    @functools.wraps(ensure)
    def make(filename: str, check_parent: bool = True) -> None:
        if check_parent or not _state.guarding:
            ensure(filename, check_parent)

    return make


def guarded(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `save_checkpoint`, after which training goes on where the checkpoint could not be saved."""

    @functools.wraps(save_checkpoint)
    def save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        _state.guarding = True
        try:
            save_checkpoint(iteration, *args, **kwargs)
        except (SaveFailed, torch.distributed.checkpoint.CheckpointException) as error:
            _report(iteration, reason(error))
        finally:
            _state.guarding = False

    return save


def guarded_finalize(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `maybe_finalize_async_save`, which goes on with the next request where one could not be saved."""

    @functools.wraps(finalize)
    def finalize_all(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return finalize(*args, **kwargs)
            except SaveFailed as error:  # the request that failed is out of Megatron's queue
                iteration, why = error.args
                _report(iteration, why)

    return finalize_all


def written_aside(save: Callable[..., Any]) -> Callable[..., Any]:
    """`dist_checkpointing.save`, made to write aside and publish; as it is outside of `guarded` and for object stores."""

    @functools.wraps(save)
    def save_aside(state: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        final = Path(checkpoint_dir)
        if not _state.guarding or "://" in str(checkpoint_dir):
            return save(state, checkpoint_dir, *args, **kwargs)
        folder, iteration = _prepare(final), folders.iteration_of(final)
        try:
            request = save(state, str(folder), *args, **kwargs)
        except torch.distributed.checkpoint.CheckpointException as error:
            _drop(folder)
            raise SaveFailed(iteration, reason(error)) from None
        if request is None:
            _publish(folder, final)
            return None
        request.finalize_fns[:] = [_naming(step, folder, iteration) for step in request.finalize_fns]
        request.finalize_fns.append(functools.partial(_publish, folder, final, tuple(_state.errors)))
        _state.errors.clear()  # the next save may begin before this one ends
        return request

    return save_aside


def _prepare(final: Path) -> Path:
    """Makes the folder aside; all ranks learn its name, or why there is none."""
    outcome = ["", ""]
    if dist.get_rank() == 0:
        folder = folders.aside(final, f"{time.time_ns():x}")
        try:
            folders.prepare(folder, final, _state.writing)
            outcome = [str(folder), ""]
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            outcome = ["", reason(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1]:
        raise SaveFailed(folders.iteration_of(final), outcome[1])
    _state.errors.clear()
    _state.writing.add(Path(outcome[0]))
    return Path(outcome[0])


def _naming(step: Callable[[], Any], folder: Path, iteration: int) -> Callable[[], Any]:
    """A step that ends an asynchronous save, with errors that say of which."""

    def named() -> None:
        try:
            step()
        except torch.distributed.checkpoint.CheckpointException as error:
            _drop(folder)
            raise SaveFailed(iteration, reason(error)) from None

    return named


def _publish(folder: Path, final: Path, earlier: tuple[str, ...] = ()) -> None:
    """Checks and publishes what all ranks have written to `folder`; the tracker is Megatron's next step.

    `earlier` are errors of this rank from when the save began.

    Raises `SaveFailed` on all ranks where anything went wrong on any.
    """
    rank, errors = dist.get_rank(), [*earlier, *_state.errors]
    _state.errors.clear()
    try:
        if not errors:
            _complete_sums(folder, rank)
    except OSError as error:
        errors.append(reason(error))
    good = agree(not errors)
    if good and rank == 0:
        try:
            _write_manifest(folder)
            folders.publish(folder, final)
        except (OSError, ValueError) as error:
            errors.append(reason(error))
    if not good or not agree(not errors):
        if errors and rank:
            print(f"cp_ring: rank {rank}: {errors[0]}", file=sys.stderr, flush=True)
        why = errors[0] if errors else "a rank could not write its part"
        _drop(folder)
        raise SaveFailed(folders.iteration_of(final), why)
    _state.writing.discard(folder)
    _state.unsaved = None


def _drop(folder: Path) -> None:
    _state.writing.discard(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _report(iteration: int, why: str) -> None:
    """Says on rank 0 that a checkpoint is missing, and what is left."""
    from megatron.training.global_vars import get_args

    _state.unsaved = iteration
    which = f"of iteration {iteration} " if iteration >= 0 else ""
    if dist.get_rank() == 0:
        good = folders.last_good(get_args().save)
        left = "there is none yet" if good is None else f"the last good one is that of iteration {good}"
        print(
            f"cp_ring: warning: the checkpoint {which}was not saved: {why}; {left}; the next save tries again",
            file=sys.stderr,
            flush=True,
        )


def _tracker_written(error: OSError | None) -> None:
    """On rank 0 alone: the checkpoint itself is in place, so that only the next restart misses it if the tracker is old."""
    if error is not None:
        _report(-1, f"the tracker was not replaced: {reason(error)}")


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """A run whose last save failed ends with one line and exit code 1, though training itself ended well."""
    try:
        yield
    except SystemExit as stop:
        if stop.code or _state.unsaved is None:
            raise
    if _state.unsaved is not None:
        if os.environ.get("RANK", "0") == "0":
            print("cp_ring: error: the last checkpoint of this run was not saved: see the warning above", file=sys.stderr)
        raise SystemExit(1)


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


# What each rank has written is summed up by the process that wrote it, off the training's path where saving is asynchronous.


def summing(get_save_function_and_args: Callable[..., Any]) -> Callable[..., Any]:
    """The writer's method, whose save function then also leaves the checksums of its files beside them."""

    @functools.wraps(get_save_function_and_args)
    def with_sums(self: Any) -> Any:
        save, preload, args = get_save_function_and_args(self)
        if save is not None and _state.guarding:
            save = functools.partial(write_and_sum, save, os.getpid())
        return save, preload, args

    return with_sums


def write_and_sum(save: Callable[..., Any], trainer: int, rank: int, buckets: list[Any], *rest: Any) -> None:
    """Writes the buckets (path, name, data), then the checksums of their files, as they can be read back.

    trainer: id of the process that trains, with which this one ends if it is another.
    """
    if os.getpid() != trainer:
        end_with_parent()
    save(rank, buckets, *rest)
    paths = [Path(bucket[0]) for bucket in buckets]
    try:
        sums = {path.name: manifest.describe(path) for path in paths}
        (paths[0].parent / _SUMS.format(rank)).write_text(json.dumps(sums))
    except OSError:
        return  # the writer itself has reported on it, or `_publish` will


def _complete_sums(folder: Path, rank: int) -> None:
    """Leaves the checksums of this rank's files beside them, unless the writer has."""
    place = folder / _SUMS.format(rank)
    if place.is_file():
        return
    mine = [path for path in folder.glob("*.distcp") if (match := _SHARD.fullmatch(path.name)) and int(match[1]) == rank]
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
    for path in sorted(folder.glob(_SUMS.format("*"))):
        sums |= json.loads(path.read_text())
        path.unlink()
    for path in folder.iterdir():
        if path.is_file() and path.name not in sums:
            sums[path.name] = manifest.describe(path)
    for name, entry in sums.items():
        length = (folder / name).stat().st_size
        if length != entry["size"]:
            raise ValueError(f"{folder / name} holds {length} of {entry['size']} bytes")
    manifest.write(folder, sums)


# On the CPU.


def own_copies(prepare_write_data: Callable[..., Any]) -> Callable[..., Any]:
    """The writer's method, which then copies tensors that training would change while another process still writes them.

    Tensors on a GPU are copied to the host anyway; those on the CPU would travel to the writer as shared memory.
    """

    @functools.wraps(prepare_write_data)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare_write_data(self, *args, **kwargs)
        if not _asynchronous():
            return
        for _, _, (_, tensors) in self.write_buckets or []:
            tensors[:] = [(item, tensor.clone() if tensor.device.type == "cpu" else tensor) for item, tensor in tensors]

    return prepare


def queue_of_results(make: Callable[..., Any]) -> Callable[..., Any]:
    """Where the writer leaves its results: in this process, unless another one writes.

    Megatron starts a server in either case, which stays behind if the process that trains is killed; this one does not.
    """

    @functools.wraps(make)
    def make_queue(*args: Any, **kwargs: Any) -> Any:
        if not _asynchronous():
            return queue.Queue()
        if _state.results is None:
            manager = SyncManager(ctx=multiprocessing.get_context("fork"))
            manager.start(initializer=end_with_parent)
            _state.results = manager.Queue()
        return _state.results

    return make_queue


@functools.cache
def end_with_parent() -> None:
    """From now on this process ends when the one that has started it does, however that ends."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def _asynchronous() -> bool:
    from megatron.training.global_vars import get_args

    return bool(getattr(get_args(), "async_save", False))


class Opener:
    """Stands for Megatron's way to open files: tracker files are published by a rename, all others as before.

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

    def _open(self, plain: Callable[..., Any], path: Any, mode: str, *rest: Any, **named: Any) -> Any:
        if not folders.is_tracker(path) or (mode == "r" and not folders.tracker_is_broken(Path(os.path.dirname(path)))):
            return plain(path, mode, *rest, **named)
        return folders.open_tracker(path, mode, current().keep_checkpoints, _tracker_written)
