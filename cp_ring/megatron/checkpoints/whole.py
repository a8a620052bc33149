"""Checkpoints of programs that call Megatron's distributed checkpointing themselves: written whole,
verified before loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, loading, manifest, saving
from cp_ring.megatron.checkpoints.gates import restricted
from cp_ring.observe import watchdog


def save_checkpoint(state: Any, folder: str | Path, iteration: int, **options: Any) -> None:
    """Saves `state` as the checkpoint `folder`/iter_0000010 of iteration 10. All ranks call it.

    It is written aside and renamed once it is whole, with a manifest of the sizes and checksums of
    its files. Then the tracker file names it, as that of Megatron's own training loop. One job at a
    time saves to a folder.

    Args:
        state: a sharded state dict, as `model.sharded_state_dict()` returns it.
        folder: where the checkpoints of the job are.
        iteration: number of the training step.
        options: for `megatron.core.dist_checkpointing.save`.

    Raises:
        cp_ring.megatron.checkpoints.saving.SaveFailed: on all ranks, where a rank could not write;
        what was saved before stays.
    """
    from megatron.core import dist_checkpointing  # heavy, and installed with Megatron only

    final = folders.folder_of(Path(folder), iteration)
    with watchdog.paused():
        unfinished = saving.make_unfinished(final)
        dist_checkpointing.save(state, str(unfinished), **options)
        saving.publish(unfinished, final)
        saving.track(Path(folder), iteration)


def load_checkpoint(
    state: Any, folder: str | Path, iteration: int | None = None, **options: Any
) -> tuple[Any, int]:
    """Loads the checkpoint of `iteration`, by default the last good one, into the sharded state
    dict `state`. All ranks call it.

    The files are compared with their manifest first. Pickled values are built only of known types,
    unless `trust_checkpoint=True` was given to `cp_ring.megatron.enable`.

    Returns:
        The state dict, and the iteration.

    Raises:
        ConfigError: on all ranks, where there is no such checkpoint, or it is not what was written.
    """
    from megatron.core import dist_checkpointing  # heavy, and installed with Megatron only

    with watchdog.paused():
        chosen = saving.on_rank_0(
            lambda: folders.last_good(folder) if iteration is None else iteration
        )
        if chosen is None:
            raise ConfigError(f"{folder} holds no whole checkpoint")
        place = folders.folder_of(Path(folder), chosen)
        before = manifest.stamps(place)
        defects = loading.defects_of(place)
        if defects:
            raise ConfigError(f"the checkpoint cannot be loaded: {defects[0]}")
        with loading.as_verified(place, before), restricted():
            return dist_checkpointing.load(state, str(place), **options), chosen
