"""The folder of checkpoints on disk: what is published, what is unfinished, what may go. Knows
neither torch nor Megatron.

A checkpoint is written to `.saving.iter_N.TOKEN.TIME`, gets its manifest there, is renamed to
`iter_N`, and counts as published once the tracker file, replaced by one rename, names it. So at any
moment the tracker names a whole checkpoint. TOKEN is that of the job's lock (`checkpoints.lock`): a
job touches the remains of its own saves and of its dead predecessors only.

A job that is stopped after its last look at the lock may go on when another job has taken over.
Both renames are of something with its TOKEN, which the other one has removed by then: they fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from cp_ring.megatron.checkpoints import files, lock, manifest

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7,18})")
_UNFINISHED = re.compile(
    rf"\.(saving|old|removed)\.(iter_\d{{7,18}}|{re.escape(TRACKER)})\.([0-9a-f]+)(\.[0-9a-f]+)?"
)


def folder_of(load: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is published."""
    return load / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """The inverse of `folder_of`; -1 for any other folder."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def published(load: Path) -> list[int]:
    """The iterations of all folders that look like published checkpoints, in ascending order."""
    try:
        return sorted(number for number in map(iteration_of, load.iterdir()) if number >= 0)
    except OSError:
        return []


def _tracker_word(load: Path) -> str | None:
    """What the tracker says; None without a tracker, "" where it cannot be read."""
    try:
        return files.read_text(load / TRACKER, 64).strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""


def tracked(load: Path) -> int | None:
    """The iteration that the tracker names; None where there is no tracker, or a broken one, or
    that of a release.
    """
    word = _tracker_word(load) or ""
    return int(word) if re.fullmatch(r"[0-9]{1,18}", word) else None


def tracker_is_broken(load: Path) -> bool:
    """Whether there is a tracker that names neither an iteration nor a release."""
    word = _tracker_word(load)
    return word is not None and word != "release" and tracked(load) is None


def last_good(load: str | Path) -> int | None:
    """The iteration of the last good checkpoint in the folder `load`, or None.

    Good means: published, and every file that its manifest names has the right size; checksums are
    computed only when it is loaded. A checkpoint without a manifest, such as stock Megatron's,
    counts where the tracker names it.
    """
    load, latest = Path(load), tracked(Path(load))
    for number in reversed(
        [number for number in published(load) if latest is None or number <= latest]
    ):
        folder = folder_of(load, number)
        if (folder / manifest.NAME).exists():
            if not manifest.defect(folder, checksums=False):
                return number
        elif number == latest and any(folder.iterdir()):
            return number
    return None


def unfinished(final: Path, token: str) -> Path:
    """A new name for the folder in which the job `token` writes the checkpoint that will be
    `final`.
    """
    return final.with_name(f".saving.{final.name}.{token}.{time.time_ns():x}")


def prepare(
    folder: Path, final: Path, tokens: Collection[str], writing: Collection[Path] = ()
) -> None:
    """Makes the unfinished `folder` of `final`, after `sweep` of its parent.

    Raises `OSError` where nothing can be written, or where there is clearly too little space.
    """
    sweep(final.parent, tokens, writing)
    folder.mkdir(parents=True)
    wanted = max(
        (manifest.size(folder_of(final.parent, number)) for number in published(final.parent)[-1:]),
        default=0,
    )
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise OSError(
            f"{final.parent} has {free / 2**20:,.1f} MiB free, and the last checkpoint took "
            f"{wanted / 2**20:,.1f} MiB"
        )


def publish(folder: Path, final: Path, held: lock.Lock) -> None:
    """Gives the unfinished folder, which is whole and has its manifest, its final name; the tracker
    does not name it yet.

    held: the lock of the parent. It is looked at again just before, because the job may have been
    stopped since the save began.

    Raises `OSError` where the folder cannot be seen whole under that name, or the lock is lost.
    """
    entries = manifest.read(folder)
    files.sync([path for path in folder.iterdir() if path.is_file()] + [folder])
    old = final.with_name(f".old.{final.name}.{held.owner.token}")
    held.check()
    if final.is_dir() and any(final.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        if old.is_dir() and not final.exists():
            old.rename(final)
        raise
    files.sync([final.parent])
    problem = manifest.defect(final, checksums=False)
    if problem or manifest.read(final) != entries:
        if old.is_dir():
            shutil.rmtree(final, ignore_errors=True)
            old.rename(final)
        raise OSError(f"{final} is not what was published: {problem or 'its manifest is another'}")
    shutil.rmtree(old, ignore_errors=True)


def sweep(load: Path, tokens: Collection[str], writing: Collection[Path] = ()) -> None:
    """Removes what interrupted saves and removals have left; a checkpoint that was about to be
    replaced comes back.

    tokens: of the jobs whose remains these are; all others are left alone.
    writing: folders of saves that still run in the background.
    """
    for path in list(load.iterdir()) if load.is_dir() else []:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None or match[3] not in tokens or path in writing or path.is_symlink():
            continue
        final = load / match[2]
        if match[1] == "old" and not final.exists():
            path.rename(final)
        elif path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


def prune(load: Path, newest: int, keep: int, token: str) -> None:
    """Removes all but the `keep` newest checkpoints up to `newest` that have a manifest; 0 keeps
    all. Links are left alone.
    """
    if not keep:
        return
    older = [folder_of(load, number) for number in published(load) if number < newest]
    ours = [
        folder for folder in older if (folder / manifest.NAME).is_file() and not folder.is_symlink()
    ]
    for folder in ours[: max(len(ours) - (keep - 1), 0)]:
        # half removed, it must not look like a checkpoint
        gone = folder.with_name(f".removed.{folder.name}.{token}")
        with contextlib.suppress(OSError):
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def open_tracker(
    path: str, mode: str, done: Callable[[int | None, OSError | None], None]
) -> Iterator[IO[Any]]:
    """As `open` for Megatron's tracker file, but what is written replaces the file by one rename.

    Then `done` is called with the iteration that the tracker names (None for a release), or with
    the error that kept the tracker from being replaced, which is not raised: the job may have lost
    its lock. A tracker that names no iteration reads as 0.
    """
    tracker = Path(path)
    if "w" not in mode:
        yield io.StringIO(str(tracked(tracker.parent) or 0))
        return
    text = io.StringIO()
    yield text
    try:
        replace_tracker(tracker.parent, text.getvalue())
        if (_tracker_word(tracker.parent) or "") != text.getvalue().strip():
            raise OSError(f"{tracker} does not name it")
    except OSError as error:
        return done(None, error)
    done(tracked(tracker.parent), None)


def replace_tracker(load: Path, text: str) -> None:
    """Lets the tracker of `load` say `text`; raises `OSError` where it cannot be replaced, or this
    job has lost its lock.
    """
    tracker = load / TRACKER
    held = lock.held(load)
    if held is None:
        files.replace_text(tracker, text)
    else:
        files.replace_text(tracker, text, unfinished(tracker, held.owner.token), held.check)


def is_tracker(path: Any) -> bool:
    """Whether `path` is a tracker file on a file system (and not in an object store)."""
    return os.path.basename(str(path)) == TRACKER and "://" not in str(path)
