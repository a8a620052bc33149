"""Preflight's measurement of links: every hop of the context-parallel groups, then every pair of
ranks, and the file of both.

In each round every rank sends to one rank and receives from another, all at once, so that n ranks
take n - 1 rounds for all n * (n - 1) links. Rounds end when `LINKS_S` seconds are over; what is
left is not measured, and the report says so.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_ring.megatron.checkpoints.files import replace_text
from cp_ring.observe import links
from cp_ring.observe.links import LinkSpeed
from cp_ring.tools.job.job_config import JobConfig
from cp_ring.tools.slurm.placement import context_groups
from cp_ring.tools.slurm.preflight_checks import Facts

if TYPE_CHECKING:
    from cp_ring.plan.ranges import Ints

# a rank may start, and answer, much later than another one: cold file systems, busy nodes
TIMEOUT_S = 300
LINKS_S = 12.0
"""Seconds after which no round begins."""
MEASURED_HOPS = 16
_MESSAGE = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}  # bytes


def measure_links(job: JobConfig, size: int, store: Any, facts: Facts) -> None:
    """Fills in `facts.links` and `facts.pairs` of one of `size` ranks, where the job has hops. All
    ranks call this together.
    """
    import torch.distributed as dist

    tp, cp = job.parallel.tensor_model_parallel_size, job.parallel.context_parallel_size
    if job.parallel.ranks != size or cp == 1:
        return
    gpu = bool(facts.gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.PrefixStore("links", store),
        rank=facts.rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    groups = context_groups(tp, cp, size)
    facts.links, facts.pairs = measure(groups, facts.rank, "cuda" if gpu else "cpu")
    dist.destroy_process_group()


def measure(
    groups: Ints,
    rank: int,
    device: str,
    limit: float = LINKS_S,
) -> tuple[list[LinkSpeed], list[LinkSpeed]]:
    """The hops by which this rank receives in its group, and its links from all ranks. All ranks of
    the job call this together.

    groups: int64 [groups, cp], the ranks of each context-parallel group. limit: seconds after which
    no round begins.
    """
    import torch

    began = time.monotonic()
    size = groups.size
    cp = groups.shape[1]
    group = next(group for group in groups.tolist() if rank in group)
    place, large = (
        group.index(rank),
        torch.zeros(_MESSAGE[device], dtype=torch.uint8, device=device),
    )
    hops: list[LinkSpeed] = []
    for hop in range(1, min(cp, MEASURED_HOPS + 1)):
        if not _time_is_left(began, limit, device):
            break
        hops.append(_link(large, hop, group[(place - hop) % cp], rank, group[(place + hop) % cp]))
    pairs = hops.copy() if cp == size else []  # then a hop is a round
    for shift in range(len(pairs) + 1, size):
        if not _time_is_left(began, limit, device):
            break
        pairs.append(_link(large, 0, (rank - shift) % size, rank, (rank + shift) % size))
    return hops, pairs


def _time_is_left(began: float, limit: float, device: str) -> bool:
    """Whether a further round may begin: the same answer on all ranks. The first one is also
    torch's first collective.
    """
    import torch
    import torch.distributed as dist

    spent = torch.tensor([time.monotonic() - began], device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item() < limit


def _link(large: Any, hop: int, sender: int, rank: int, receiver: int) -> LinkSpeed:
    """The link from `sender` to this rank, while this rank sends as much to `receiver`."""
    from cp_ring.tools.job.speeds import exchange

    latency = min(exchange(large[:8], sender, receiver) for _ in range(4))
    seconds = min(exchange(large, sender, receiver) for _ in range(2))
    return LinkSpeed(hop, sender, rank, large.numel() / seconds, latency)


def write_links(folder: Path, ranks: Sequence[Facts]) -> Iterator[str]:
    """Writes what was measured into the run directory, whole or not at all; gives a line that names
    the file or the reason.
    """
    hops, pairs = (
        [link for facts in ranks for link in facts.links],
        [link for facts in ranks for link in facts.pairs],
    )
    if not hops:
        return
    speeds = [facts.speeds for facts in ranks if facts.speeds]
    slow = {
        name: min(each[name] for each in speeds) for name in ("tflops", "memory_gb_s") if speeds
    }
    slow |= {"call_us": max(each["call_us"] for each in speeds)} if speeds else {}
    record = links.record([facts.host for facts in ranks], hops, pairs, slow)
    path = folder / links.FILE
    try:
        replace_text(path, json.dumps(record) + "\n")
        yield f"speeds of links and of the slowest rank are in {path}: cp-ring plan --rates {path}"
    except OSError as error:
        yield f"warning: {path} cannot be written: {error.strerror}"
