"""How many neighboring ranks of a group share a node, as the launcher placed them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks of the whole job on each node, as torchrun or Slurm told this process; None if neither
    did.

    Nodes may have different numbers of ranks, as Slurm's `4(x2),3`: then None too, on all ranks.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        own, ranks, nodes = (
            int(environment.get(f"{name}WORLD_SIZE", 0)) for name in ("LOCAL_", "", "GROUP_")
        )
        return own if not nodes or own * nodes == ranks else None
    tasks = re.fullmatch(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(tasks[1]) if tasks else None


def node_size(ranks: Sequence[int], per_node: int | None) -> int:
    """Neighboring ranks of a group on one node: 1 if that is not known, or not the same for all its
    nodes.

    ranks: the ranks of the group in the whole job, where each `per_node` consecutive ranks share a
    node.
    """
    if not per_node or not ranks:
        return 1
    runs = [(node, len(list(run))) for node, run in groupby(rank // per_node for rank in ranks)]
    alike = len({size for _, size in runs}) == 1 and len({node for node, _ in runs}) == len(runs)
    return runs[0][1] if alike else 1
