"""Which checkpoint is loaded: the one that the tracker names if it is what was written, else the last good one before it.

Rank 0 lists them, all ranks share the reading, and all agree.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, inspection, manifest
from cp_ring.megatron.checkpoints.saving import agree
from cp_ring.megatron.checkpoints.unpickle import one_line_refusal, restricted
from cp_ring.megatron.rejection import note


def verified(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `load_checkpoint`, of a verified checkpoint and without executing what is pickled in it."""

    @functools.wraps(load_checkpoint)
    def load(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        which = kwargs.get("load_arg", args[3] if len(args) > 3 else "load")
        with one_line_refusal():
            if which == "load":
                agree_on_iteration(get_args())
            with restricted():
                return load_checkpoint(*args, **kwargs)

    return load


def tracker_reader(read_metadata: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `read_metadata`, which ends the process at a broken tracker; the iteration chosen by --ckpt-step replaces it."""

    @functools.wraps(read_metadata)
    def read(tracker: Any) -> tuple[int, bool]:
        load = Path(tracker).parent
        if folders.is_tracker(tracker) and folders.tracker_is_broken(load):
            return inspection.chosen(load) or 0, False
        result: tuple[int, bool] = read_metadata(tracker)
        return result

    return read


def agree_on_iteration(args: argparse.Namespace) -> None:
    """Sets `args.ckpt_step` alike on all ranks where not the tracker's checkpoint is to be loaded.

    Raises `ConfigError` on all ranks if there are checkpoints but none is good, or not the one that --ckpt-step asks for.
    """
    load = getattr(args, "load", None)
    if not load or "://" in str(load):
        return
    load, plan = Path(load), [[], None]
    if dist.get_rank() == 0:
        if str(load) == str(getattr(args, "save", None)):
            _tidy(load)
        plan = [*inspection.candidates(load, inspection.asked(args))]
    dist.broadcast_object_list(plan, src=0)
    numbers, latest = plan
    problem = ""
    for number in numbers:
        defects = _defects(folders.folder_of(load, number))
        if not defects:
            inspection.take(args, load, number, latest, problem)
            if not (folders.folder_of(load, number) / manifest.NAME).is_file():
                note(f"the checkpoint of iteration {number} has no manifest: it is loaded unverified")
            return
        problem = problem or defects[0]
    if numbers:
        raise ConfigError(inspection.nothing_whole(args, load, problem))


def _defects(folder: Path) -> list[str]:
    """What any rank finds wrong with the checkpoint; each rank reads a part of its files."""
    problem = manifest.defect(folder, (dist.get_rank(), dist.get_world_size()))
    if not problem and dist.get_rank() == 0:
        problem = inspection.defect(folder)
    if agree(not problem):
        return []
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return [line for line in found if line]


def _tidy(load: Path) -> None:
    try:
        folders.sweep(load)
    except OSError:
        return  # a folder that cannot be written to can still be read from
