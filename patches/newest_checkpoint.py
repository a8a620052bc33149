"""Lets a job resume from the newest whole checkpoint: see `cp_ring.megatron.newest_checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import checkpointing

    from cp_ring.megatron.newest_checkpoint import newest_whole

    yield checkpointing, "read_metadata", newest_whole(checkpointing.read_metadata)


PATCH = Patch(
    what="passes over a checkpoint that is not whole, in one line, when a job resumes",
    why="a kill during a save can leave an empty tracker, or a shard that is cut short, which no "
    "restart can load",
    needed=lambda args, options: args.load,
    replacements=_replacements,
)
