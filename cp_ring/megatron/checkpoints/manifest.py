"""The manifest of a checkpoint: sizes and checksums of its files, in a file beside them.

A checksum tells that a file is the one that was written. It does not tell who wrote it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from cp_ring.megatron.checkpoints import files

NAME = "cp_ring_manifest.json"
_CHUNK = 8 << 20


class Entry(TypedDict):
    """What a file should be: its size in bytes, and its CRC-32 as eight hexadecimal digits."""

    size: int
    crc32: str


def describe(path: Path) -> Entry:
    """Size and CRC-32 of a file as it can be read now."""
    size, checksum = 0, 0
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"size": size, "crc32": f"{checksum:08x}"}


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Writes the manifest of `folder`, whole or not at all."""
    files.replace_text(
        folder / NAME, json.dumps({"format": 1, "files": dict(sorted(entries.items()))}, indent=1)
    )


def read(folder: Path) -> dict[str, Entry] | None:
    """The files that the manifest of `folder` names, or None where there is no manifest.

    Raises `ValueError` for a manifest that cp_ring has not written, `OSError` where it cannot be
    read.
    """
    try:
        listed = files.read_json(folder / NAME).get("files")
    except FileNotFoundError:
        return None
    if not isinstance(listed, dict) or not listed:
        raise ValueError("it names no files")
    return {name: _entry(name, value) for name, value in listed.items()}


def _entry(name: str, value: object) -> Entry:
    """A checked entry of the file `name`; raises `ValueError`."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or not isinstance(value, dict):
        raise ValueError(f"its entry {name!r:.60} does not describe a file")
    size = value.get("size")
    crc32 = value.get("crc32")
    if type(size) is not int or size < 0 or not isinstance(crc32, str):
        raise ValueError(f"its entry {name!r:.60} has size {size!r:.20} and crc32 {crc32!r:.20}")
    return {"size": size, "crc32": crc32}


def size(folder: Path) -> int:
    """Bytes of all files that the manifest names; 0 without one."""
    try:
        return sum(entry["size"] for entry in (read(folder) or {}).values())
    except (OSError, ValueError):
        return 0


Stamps = dict[Path, tuple[int, int, int]]
"""Of each file: its size, and when its content and its inode were changed, in ns. Whatever replaces
a file changes them.
"""


def stamps(folder: Path) -> Stamps:
    """The stamps of the files of `folder`; {} where there is no such folder."""
    try:
        statuses = {path: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError:
        return {}
    return {
        path: (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path, status in statuses.items()
    }


def changed(folder: Path, before: Stamps) -> str:
    """Which file of `folder` is no longer that of `before`, in a line, or ""."""
    now = stamps(folder)
    other = [path for path in sorted({*before, *now}) if now.get(path) != before.get(path)]
    return f"{other[0]} was replaced or changed while it was loaded" if other else ""


def defect(folder: Path, part: tuple[int, int] = (0, 1), checksums: bool = True) -> str:
    """Why the files of `folder` are not those of its manifest, or "" (also where there is no
    manifest).

    part: (i, n) computes the checksum of every n-th file only, from the i-th on, so that ranks can
        share the work; sizes are always compared.
    """
    try:
        entries = read(folder)
    except (OSError, ValueError) as error:
        return f"{folder / NAME} is not readable ({type(error).__name__}: {error})"
    for place, (name, wanted) in enumerate(sorted((entries or {}).items())):
        path = folder / name
        try:
            length = path.stat().st_size
            if length != wanted["size"]:
                return f"{path} holds {length} of {wanted['size']} bytes"
            if (
                checksums
                and place % part[1] == part[0]
                and describe(path)["crc32"] != wanted["crc32"]
            ):
                return f"{path} is not what was written: its checksum is another"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"
    return ""
