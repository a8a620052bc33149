"""What the files of a checkpoint should be: their sizes and checksums, in a file beside them.

A checksum tells that a file is the one that was written. It does not tell who wrote it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "cp_ring_manifest.json"
_CHUNK = 8 << 20

Entry = dict[str, Any]  # {"size": bytes, "crc32": hexadecimal}


def describe(path: Path) -> Entry:
    """Size and CRC-32 of a file as it can be read now."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"size": size, "crc32": f"{checksum:08x}"}


def write(folder: Path, files: Mapping[str, Entry]) -> None:
    """Writes the manifest of `folder`, whole or not at all."""
    write_whole(folder / NAME, json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1))


def read(folder: Path) -> dict[str, Entry] | None:
    """The files that the manifest of `folder` names, or None where there is no manifest.

    Raises `ValueError` for a manifest that is not one.
    """
    try:
        text = (folder / NAME).read_text()
    except FileNotFoundError:
        return None
    files = json.loads(text).get("files") if text.lstrip().startswith("{") else None
    if not isinstance(files, dict) or not files:
        raise ValueError("it names no files")
    for name, entry in files.items():
        if "/" in name or not isinstance(entry, dict) or not {"size", "crc32"} <= set(entry):
            raise ValueError(f"its entry {name!r} is not one of a file")
    return files


def size(folder: Path) -> int:
    """Bytes of all files that the manifest names; 0 without one."""
    try:
        return sum(entry["size"] for entry in (read(folder) or {}).values())
    except (OSError, ValueError):
        return 0


def defect(folder: Path, part: tuple[int, int] = (0, 1), checksums: bool = True) -> str:
    """Why the files of `folder` are not those of its manifest, or "" (also where there is no manifest).

    part: (i, n) has only every n-th file's checksum computed, from the i-th on, so that ranks can share the work; sizes are
        always compared.
    """
    try:
        files = read(folder)
    except (OSError, ValueError) as error:
        return f"{folder / NAME} is not readable ({type(error).__name__}: {error})"
    for place, (name, wanted) in enumerate(sorted((files or {}).items())):
        path = folder / name
        try:
            length = path.stat().st_size
            if length != wanted["size"]:
                return f"{path} holds {length} of {wanted['size']} bytes"
            if checksums and place % part[1] == part[0] and describe(path)["crc32"] != wanted["crc32"]:
                return f"{path} is not what was written: its checksum is another"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return ""


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that at any moment, a power failure included, it is the old one or the new one."""
    aside = path.with_name(path.name + ".next")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync([path.parent])


def sync(paths: Iterable[Path]) -> None:
    """Waits until these files or folders are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
