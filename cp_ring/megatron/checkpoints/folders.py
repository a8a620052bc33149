"""The folder of checkpoints on disk: what is published, what is set aside, what may go. Knows neither torch nor Megatron.

A checkpoint is written to `.saving.iter_N.TOKEN`, gets its manifest there, is renamed to `iter_N`, and counts as published once
the tracker file, replaced by one rename, names it. So at any moment the tracker names a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from cp_ring.megatron.checkpoints import manifest

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7,})")
_SAVING, _OLD = ".saving.", ".old."


def folder_of(load: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is published."""
    return load / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """The inverse of `folder_of`; -1 for any other folder."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def saved(load: Path) -> list[int]:
    """The iterations of all folders that look like published checkpoints, in ascending order."""
    try:
        return sorted(number for number in map(iteration_of, load.iterdir()) if number >= 0)
    except OSError:
        return []


def tracked(load: Path) -> int | None:
    """The iteration that the tracker names, or None (no tracker, a broken one, or that of a release)."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        word = (load / TRACKER).read_text().strip()
        return int(word) if word.isdecimal() and word.isascii() else None
    return None


def tracker_is_broken(load: Path) -> bool:
    """Whether there is a tracker that names neither an iteration nor a release."""
    tracker = load / TRACKER
    try:
        return tracker.is_file() and tracked(load) is None and tracker.read_text().strip() != "release"
    except (OSError, UnicodeDecodeError):
        return True


def last_good(load: str | Path) -> int | None:
    """The iteration of the last good checkpoint in the folder `load`, or None.

    Good means: published, and every file that its manifest names has the right size; checksums are computed only when it is
    loaded. A checkpoint without a manifest, such as stock Megatron's, counts where the tracker names it.
    """
    load, latest = Path(load), tracked(Path(load))
    for number in reversed([number for number in saved(load) if latest is None or number <= latest]):
        folder = folder_of(load, number)
        if (folder / manifest.NAME).is_file():
            if not manifest.defect(folder, checksums=False):
                return number
        elif number == latest and any(folder.iterdir()):
            return number
    return None


def aside(final: Path, token: str) -> Path:
    """Where the checkpoint that will be `final` is written."""
    return final.with_name(f"{_SAVING}{final.name}.{token}")


def prepare(folder: Path, final: Path, writing: Collection[Path] = ()) -> None:
    """Makes the folder aside, after removing what earlier, interrupted saves have left there, but not the folders `writing`.

    Raises `OSError` where nothing can be written, or where there is clearly too little space.
    """
    sweep(final.parent, writing)
    folder.mkdir(parents=True)
    wanted = max((manifest.size(folder_of(final.parent, number)) for number in saved(final.parent)[-1:]), default=0)
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise OSError(f"{final.parent} has {free / 2**20:,.1f} MiB free, and the last checkpoint took {wanted / 2**20:,.1f} MiB")


def publish(folder: Path, final: Path) -> None:
    """Gives the folder aside, whole and with its manifest, its own name; the tracker does not name it yet."""
    manifest.sync([path for path in folder.iterdir() if path.is_file()] + [folder])
    if final.is_dir() and any(final.iterdir()):
        old = final.with_name(_OLD + final.name)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    manifest.sync([final.parent])
    shutil.rmtree(final.with_name(_OLD + final.name), ignore_errors=True)


def sweep(load: Path, writing: Collection[Path] = ()) -> None:
    """Removes what interrupted saves and removals have left; a checkpoint that was about to be replaced comes back.

    `writing` are folders of saves that still run in the background.
    """
    if not load.is_dir():
        return
    for path in load.iterdir():
        if path.name.startswith(_OLD):
            final = path.with_name(path.name.removeprefix(_OLD))
            if iteration_of(final) >= 0 and not final.exists():
                path.rename(final)
                continue
        if path.name.startswith((_SAVING, _OLD)) and path.is_dir() and path not in writing:
            shutil.rmtree(path, ignore_errors=True)


def prune(load: Path, newest: int, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints up to `newest` that have a manifest; 0 keeps all. Links are left alone."""
    if not keep:
        return
    folders = [folder_of(load, number) for number in saved(load) if number < newest]
    ours = [folder for folder in folders if (folder / manifest.NAME).is_file() and not folder.is_symlink()]
    for folder in ours[: max(len(ours) - (keep - 1), 0)]:
        gone = folder.with_name(f"{_SAVING}{folder.name}.removed")  # half removed, it must not look like a checkpoint
        with contextlib.suppress(OSError):
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def open_tracker(
    path: str, mode: str, keep: int = 0, done: Callable[[OSError | None], None] = lambda error: None
) -> Iterator[IO[Any]]:
    """As `open` for Megatron's tracker file, but what is written replaces the file by one rename.

    After that, older checkpoints than the `keep` newest go, and `done` is called; where the tracker could not be replaced, with
    the error, which is not raised. A tracker that names no iteration reads as 0.
    """
    tracker = Path(path)
    if "w" not in mode:
        yield io.StringIO(str(tracked(tracker.parent) or 0))
        return
    text = io.StringIO()
    yield text
    try:
        manifest.write_whole(tracker, text.getvalue())
    except OSError as error:
        return done(error)
    if text.getvalue().strip().isdecimal():
        prune(tracker.parent, int(text.getvalue()), keep)
    done(None)


def is_tracker(path: Any) -> bool:
    """Whether `path` is a tracker file on a file system (and not in an object store)."""
    return os.path.basename(str(path)) == TRACKER and "://" not in str(path)
