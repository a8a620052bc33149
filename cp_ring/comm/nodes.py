"""Finds how many neighboring ranks of a group share a node, as the launcher placed them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of the job's ranks on each node, as torchrun or Slurm told this process;
    None if neither did.

    It is None on all ranks if nodes have different numbers of ranks, as in Slurm's `4(x2),3`.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        own, ranks, nodes = (
            int(environment.get(f"{name}WORLD_SIZE", 0)) for name in ("LOCAL_", "", "GROUP_")
        )
        return own if not nodes or own * nodes == ranks else None
    tasks = re.fullmatch(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(tasks[1]) if tasks else None


def node_size(ranks: Sequence[int], per_node: int | None) -> int:
    """Return how many neighboring ranks of a group are on one node: 1 if that is unknown, or
    differs between its nodes.

    ranks: the ranks of the group in the whole job, where each `per_node` consecutive ranks share a
    node.
    """
    if not per_node or not ranks:
        return 1
    runs = [(node, len(list(run))) for node, run in groupby(rank // per_node for rank in ranks)]
    alike = len({size for _, size in runs}) == 1 and len({node for node, _ in runs}) == len(runs)
    return runs[0][1] if alike else 1
