"""Chooses which checkpoint is loaded: the one that the tracker names if it is whole, else the last
good one before it.

Rank 0 lists the candidates, all ranks share the work of reading them, and all agree.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, lock, manifest
from cp_ring.megatron.checkpoints.gates import restricted
from cp_ring.megatron.checkpoints.saving import all_ranks_agree, on_rank_0
from cp_ring.megatron.rejection import note, rejecting
from cp_ring.megatron.wrapping import Function, around
from cp_ring.observe import watchdog
from cp_ring.runtime import RUNTIME

_loaded = RUNTIME.cell(False)


def has_loaded() -> bool:
    """Whether this process has loaded a checkpoint into its model."""
    return _loaded.value


@around
def verified(load_checkpoint: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `load_checkpoint`, of a verified checkpoint and through the gates."""
    from megatron.training.global_vars import get_args

    which = kwargs.get("load_arg", args[3] if len(args) > 3 else "load")
    with rejecting(), watchdog.paused():
        chosen = agree_on_iteration(get_args()) if which == "load" else None
        with as_verified(*chosen) if chosen else contextlib.nullcontext(), restricted():
            result = load_checkpoint(*args, **kwargs)
    _loaded.value |= (
        bool(result[0]) or which != "load" or bool(getattr(get_args(), "finetune", False))
    )
    return result


@contextlib.contextmanager
def as_verified(folder: Path, before: manifest.Stamps) -> Iterator[None]:
    """Raises `ConfigError` on all ranks where files of `folder` were changed since they had the
    stamps `before`.

    What is loaded within is then what was verified: a job that reads its checkpoint takes long
    enough for somebody to copy another one over it.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        changed = manifest.changed(folder, before)
        if changed:
            raise ConfigError(_AGAIN.format(changed)) from error
        raise
    changed = manifest.changed(folder, before)
    if not all_ranks_agree(not changed):
        raise ConfigError(
            _AGAIN.format(
                changed or f"a file of {folder} was replaced or changed while it was loaded"
            )
        )


_AGAIN = "the checkpoint is not what was verified: {}: start the job again"


@around
def gated(read: Function, *args: Any, **kwargs: Any) -> Any:
    """One of Megatron's functions that read a checkpoint before `load_checkpoint` does, through the
    gates of `unpickle`.
    """
    with rejecting(), restricted():
        return read(*args, **kwargs)


@around
def tracker_reader(read_metadata: Function, tracker: Any) -> tuple[int, bool]:
    """Megatron's `read_metadata`, which ends the process at a broken tracker; here the chosen
    iteration stands in for it.
    """
    load = Path(tracker).parent
    if folders.is_tracker(tracker) and folders.tracker_is_broken(load):
        from cp_ring.megatron.checkpoints import inspection

        return inspection.fallback_iteration(load) or 0, False
    result: tuple[int, bool] = read_metadata(tracker)
    return result


def agree_on_iteration(args: argparse.Namespace) -> tuple[Path, manifest.Stamps] | None:
    """Sets `args.ckpt_step` to the same iteration on all ranks where the tracker's checkpoint is
    not to be loaded.

    Returns the folder that is to be loaded and its stamps from before it was verified, or None
    where there is none.

    Raises `ConfigError` on all ranks if there are checkpoints but none is good, or if the one that
    --ckpt-step asks for is not.
    """
    if not getattr(args, "load", None) or "://" in str(args.load):
        return None
    from cp_ring.megatron.checkpoints import inspection

    load = Path(args.load)
    before: dict[Path, manifest.Stamps] = {}

    def defect_of(folder: Path) -> str:
        before[folder] = manifest.stamps(folder)
        return next(iter(defects_of(folder)), "")

    def candidates() -> Any:
        """As rank 0 sees them, after it has removed the remains of earlier saves of this job."""
        held = lock.held(load)
        if held is not None:
            # a folder that cannot be written to can still be read from
            with contextlib.suppress(OSError):
                folders.sweep(load, held.tokens)
        return inspection.candidates(load, inspection.requested_iteration(args))

    folder = inspection.choose_first(args, load, on_rank_0(candidates), defect_of)
    if folder is None:
        return None
    if not (folder / manifest.NAME).is_file():
        number = folders.iteration_of(folder)
        note(f"the checkpoint of iteration {number} has no manifest: it is loaded unverified")
    return folder, before[folder]


def defects_of(folder: Path) -> list[str]:
    """The defects of the checkpoint that the ranks find; each reads a part of its files."""
    problem = manifest.defect(folder, (dist.get_rank(), dist.get_world_size()))
    if not problem and dist.get_rank() == 0:
        from cp_ring.megatron.checkpoints import inspection

        problem = inspection.defect(folder)
    if all_ranks_agree(not problem):
        return []
    defects: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(defects, problem)
    return [line for line in defects if line]
