"""Lets a job resume from the newest whole checkpoint: see `cp_ring.megatron.newest_checkpoint`."""

from __future__ import annotations

from cp_ring.patches.patch import Patch

PATCH = Patch(
    what="passes over a checkpoint that is not whole, in one line, when a job resumes",
    why="a kill during a save can leave an empty tracker, or a shard that is cut short, which no "
    "restart can load",
    needed=lambda args, options: args.load,
    wraps={
        "megatron.training."
        "checkpointing.read_metadata": "cp_ring.megatron.newest_checkpoint.newest_whole",
    },
)
