"""Reading and writing single files of a folder that others can write to."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file for reading; raises `OSError` for anything else.

    A named pipe would block its reader for ever, and a device such as /dev/zero never ends.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{os.fspath(path)} is not a regular file")
    return os.fdopen(handle, "rb")


def read_text(path: Path, limit: int) -> str:
    """The text of a regular file of at most `limit` bytes; raises `OSError` or `ValueError`."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it holds more than {limit} bytes")
    return data.decode()


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """The JSON object in a file; raises `OSError`, or `ValueError` where it is none or names a key
    twice.
    """
    try:
        content = json.loads(read_text(path, limit), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"it names {key!r:.60} twice")
        content[key] = value
    return content


def beside(path: Path) -> Path:
    """A new name in the folder of `path` that nobody can predict: at a known one, a link could lead
    a write elsewhere.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def write_new(path: Path, text: str) -> None:
    """Writes a file that does not exist yet and waits until it is on disk; raises `FileExistsError`
    where it does.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(
    path: Path, text: str, aside: Path | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Replaces a file so that at any moment, a power failure included, it is the old one or the new
    one.

    `check` runs when the text is in the file `aside`: whoever removes that file prevents the rest.
    """
    aside = aside or beside(path)
    try:
        write_new(aside, text)
        check()
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync([path.parent])


def sync(paths: Iterable[Path]) -> None:
    """Waits until these files or folders are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
