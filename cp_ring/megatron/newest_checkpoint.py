"""Finds the newest whole checkpoint of a folder, from which a job resumes.

Megatron writes and reads checkpoints. Its tracker names the newest one, but a kill or a full disk
can leave the tracker empty, and a file system can lose the content of a shard. A checkpoint is
whole if its index (`.metadata`) can be read and the shards that it names have their sizes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.compat import arguments
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.rejection import rejecting
from cp_ring.megatron.wrapping import Function

TRACKER = "latest_checkpointed_iteration.txt"


def newest_whole(read_metadata: Function, tracker: Any) -> tuple[int, bool]:
    """Replace Megatron's `read_metadata` of a tracker file: return the iteration of the newest
    whole checkpoint, and whether it is a release.

    Rank 0 looks and all ranks follow. A line names the checkpoints that it skips. If there are
    checkpoints and none is whole, the job ends with one line.
    """
    tracker = str(tracker)
    step_is_given = any(word.partition("=")[0] == "--ckpt-step" for word in sys.argv)
    if "://" in tracker or _word(Path(tracker)) == "release" or step_is_given:
        return read_metadata(tracker)
    with rejecting():
        found: list[Any] = [None, ""]
        running = dist.is_initialized()
        if not running or dist.get_rank() == 0:
            found[:] = find(Path(tracker).parent)
        if running:
            dist.broadcast_object_list(found)
        iteration, passed_over = found
        if iteration is None and _stands_beside_others(Path(tracker).parent):
            note(f"passing over {passed_over}")
            return -1, False
        if iteration is None:
            raise ConfigError(
                f"--load {Path(tracker).parent}: no checkpoint in it is whole ({passed_over}): "
                "give another folder"
            )
        if passed_over:
            note(f"passing over {passed_over}: resuming from iteration {iteration}")
    return iteration, False


def _stands_beside_others(folder: Path) -> bool:
    """Return True for the folder of --non-persistent-ckpt-type global: if there is no checkpoint in
    it, Megatron takes those of --load.
    """
    args = arguments()
    if getattr(args, "non_persistent_ckpt_type", None) != "global":
        return False
    return folder == Path(args.non_persistent_global_ckpt_dir or Path(args.load, "non_persistent"))


def find(folder: Path) -> tuple[int | None, str]:
    """Return the iteration of the newest whole checkpoint in `folder`, and the defect of the newer
    one that the tracker names, or of the tracker. The iteration is None if there is none.

    Checkpoints newer than the one that the tracker names are not considered: their saves have not
    ended.
    """
    word = _word(folder / TRACKER)
    latest = int(word) if re.fullmatch(r"[0-9]{1,18}", word) else None
    # not the copies that users keep, such as iter_0000100_best
    names = (re.fullmatch(r"iter_([0-9]{7,18})", path.name) for path in folder.glob("iter_*"))
    there = sorted((int(name[1]) for name in names if name), reverse=True)
    problem = "" if latest is not None else f"the tracker {TRACKER}, which names no iteration"
    if latest is not None and not there:
        return latest, ""  # all that a job with --freeze-all-layers writes
    if latest is not None:
        there = [latest, *(iteration for iteration in there if iteration < latest)]
    for iteration in there:
        defect = defect_of(folder / f"iter_{iteration:07d}")
        if not defect:
            return iteration, problem
        problem = problem or f"the checkpoint of iteration {iteration} ({defect})"
    return None, problem


def defect_of(folder: Path) -> str:
    """Return why the checkpoint `folder` (iter_N) is not whole, or "".

    Reads the index of torch_dist, torch_dcp and fsdp_dtensor checkpoints. A checkpoint of
    Megatron's old format has no index and counts as whole.
    """
    from torch.distributed.checkpoint import FileSystemReader

    if not folder.is_dir():
        return f"{folder} does not exist"
    if any(folder.glob("mp_rank_*")):
        return ""
    if not (folder / ".metadata").is_file():
        return f"{folder / '.metadata'} is missing"
    try:
        index = FileSystemReader(folder).read_metadata()
        needed: dict[str, int] = {}
        for stored in index.storage_data.values():
            end = stored.offset + stored.length
            needed[stored.relative_path] = max(needed.get(stored.relative_path, 0), end)
    except Exception as error:  # unpickling a truncated file raises nearly any exception
        return f"{folder / '.metadata'} cannot be read ({type(error).__name__})"
    for name, size in sorted(needed.items()):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if (found := (folder / name).stat().st_size) < size:
            return f"{folder / name} holds {found} of {size} bytes"
    # only torch_dist has this file, and writes it last
    if "args" in index.state_dict_metadata:
        return ""
    try:
        json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError) as error:
        return f"{folder / 'metadata.json'} cannot be read ({type(error).__name__})"
    return ""


def _word(tracker: Path) -> str:
    """Return the text of the tracker, or "" if it cannot be read."""
    try:
        return tracker.read_text().strip()
    except (OSError, ValueError):
        return ""
