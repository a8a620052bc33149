"""Notices what must not happen while a checkpoint loads: a call of `trip`, a written file, a new
process, an import.

Everything here is harmless: `trip` appends to a list, and files are written in temporary folders
only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

TRIPPED: list[str] = []
_seen: list[str] | None = None
_PROCESSES = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
)
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
    "shutil.copyfile",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def trip(*args: Any, **kwargs: Any) -> str:
    """What a gadget calls if it can."""
    TRIPPED.append("called")
    return "tripped"


class Trip:
    """A class whose construction and whose state trip."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Trip:
        trip()
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        trip()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if (
        event in _PROCESSES
        or event in _CHANGES
        or event in ("compile", "exec", "ctypes.dlopen", "socket.connect")
    ):
        _seen.append(f"{event} {args[:1]!r:.80}")
    elif event == "import" and not str(args[0]).startswith(("torch.", "encodings")):
        _seen.append(f"import {args[0]}")
    elif event == "open" and (args[2] or 0) & _WRITING:
        _seen.append(f"open for writing {args[0]!r:.80}")


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What happens in the block that must not; files that cp_ring itself opens for reading do not
    count.
    """
    global _seen
    TRIPPED.clear()
    found: list[str] = []
    _seen = found
    try:
        yield found
    finally:
        _seen = None
        found += TRIPPED
