"""The checks of preflight: pure functions that turn the facts of the ranks into problems, one line
each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cp_ring.observe.links import LinkSpeed, by_class
from cp_ring.tools.job.job_config import JobConfig

CLOCK_S = 5.0
FREE_BYTES = 2 * 2**30
FREE_GPU_SHARE = 0.9
SLOW_RANK, SLOW_LINK = 2.0, 4.0


@dataclass(frozen=True)
class Problem:
    """One line about something that is wrong. A job with a `fatal` problem must not train."""

    line: str
    fatal: bool = True


@dataclass
class Facts:
    """What one rank reports. Times are in seconds, sizes in bytes.

    gpu: {} if there is none. missing: what the job needs and this host does not have, one line
    each. flops: of a matrix product.
    links: the hops of the context-parallel groups. pairs: links to all ranks. speeds: what
    `cp_ring.tools.job.speeds` measures.
    """

    rank: int
    host: str
    address: str
    interface: str
    config_hash: str
    versions: dict[str, str]
    clock: float
    writable: str
    shared: bool
    free: int
    flops: float
    gpu: dict[str, Any] = field(default_factory=dict)
    links: list[LinkSpeed] = field(default_factory=list)
    pairs: list[LinkSpeed] = field(default_factory=list)
    speeds: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def judge(job: JobConfig, ranks: Sequence[Facts]) -> list[Problem]:
    """All problems, fatal ones first."""
    problems = [*sizes(job, len(ranks), len({facts.host for facts in ranks}))]
    for check in (
        installed,
        same_everywhere,
        names,
        run_directory,
        clocks,
        gpus,
        slow_ranks,
        slow_links,
    ):
        problems += check(ranks)
    return sorted(problems, key=lambda problem: not problem.fatal)


def sizes(job: JobConfig, world: int, hosts: int) -> Iterator[Problem]:
    """The sizes in section parallel give the number of ranks that were started, with the same
    number on each node.
    """
    if world == 1:
        return  # preflight runs alone, before the job
    if job.parallel.ranks != world:
        yield Problem(
            f"section parallel makes {job.parallel.ranks} ranks, but {world} were started"
        )
    if world % hosts:
        yield Problem(f"{world} ranks do not divide by {hosts} nodes")
    elif job.parallel.tensor_model_parallel_size > world // hosts:
        tp = job.parallel.tensor_model_parallel_size
        yield Problem(
            f"parallel.tensor_model_parallel_size {tp} is more than the {world // hosts} ranks of "
            "a node: slow",
            False,
        )


def installed(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """Every host has the GPUs and the packages that the job needs."""
    for line in dict.fromkeys(
        f"{facts.host}: {missing}" for facts in ranks for missing in facts.missing
    ):
        yield Problem(line)


def same_everywhere(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """Every rank reads the same job with the same software."""
    for facts in ranks:
        if facts.config_hash != ranks[0].config_hash:
            yield Problem(
                f"rank {facts.rank} on {facts.host} reads a different job.yaml than rank 0 on "
                f"{ranks[0].host}"
            )
        for name, version in ranks[0].versions.items():
            other = facts.versions.get(name)
            if other != version:
                where = f"rank {facts.rank} on {facts.host} has {name} {other}"
                yield Problem(f"{where}, rank 0 on {ranks[0].host} has {version}")


def names(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """Other hosts can reach each host by its name, or its network device is given."""
    if len({facts.host for facts in ranks}) == 1:
        return
    for facts in _one_per_host(ranks):
        if facts.interface == "lo":
            yield Problem(
                f"{facts.host}: GLOO_SOCKET_IFNAME is lo, which no other host can reach: name a "
                "device in env.sh"
            )
        elif facts.address.startswith("127.") and not facts.interface:
            yield Problem(
                f"{facts.host}: its name resolves to {facts.address}, which no other host can "
                "reach: set GLOO_SOCKET_IFNAME in env.sh"
            )


def run_directory(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """The run directory is the same on all hosts, can be written, and has free space."""
    for facts in _one_per_host(ranks):
        if facts.writable:
            yield Problem(f"launch.run_dir cannot be written on {facts.host}: {facts.writable}")
        elif not facts.shared:
            yield Problem(
                f"launch.run_dir is a different directory on {facts.host} than on {ranks[0].host}: "
                "use a shared file system"
            )
    room = min(ranks, key=lambda facts: facts.free)
    if room.free < FREE_BYTES:
        yield Problem(
            f"launch.run_dir has {room.free / 2**30:.1f} GiB free on {room.host}: too little for "
            "checkpoints?",
            False,
        )


def clocks(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """The clocks of all hosts agree within CLOCK_S seconds."""
    middle = statistics.median(facts.clock for facts in ranks)
    for facts in _one_per_host(ranks):
        if abs(facts.clock - middle) > CLOCK_S:
            yield Problem(
                f"the clock of {facts.host} is {facts.clock - middle:+.0f} s off the clocks of the "
                "others",
                False,
            )


def gpus(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """Either all ranks have a GPU or none has; the GPUs are of one kind, healthy and free."""
    kinds = {facts.gpu.get("name") for facts in ranks}
    if len(kinds) > 1:
        by_kind = {facts.gpu.get("name"): facts for facts in reversed(ranks)}
        shown = ", ".join(
            f"{facts.host} has {kind or 'none'}"
            for kind, facts in sorted(by_kind.items(), key=lambda item: str(item[0]))
        )
        yield Problem(f"GPUs differ: {shown}", None in kinds)
    for facts in ranks:
        where = f"GPU {facts.gpu.get('index')} of {facts.host}"
        if facts.gpu.get("uncorrected_errors"):
            yield Problem(
                f"{where}: {facts.gpu['uncorrected_errors']} uncorrected memory errors: leave out "
                "this node"
            )
        total = facts.gpu.get("total", 0)
        free = facts.gpu.get("free", 0)
        if total and free < FREE_GPU_SHARE * total:
            yield Problem(
                f"{where}: only {free / 2**30:.0f} of {total / 2**30:.0f} GiB are free: does "
                "another process use it?",
                False,
            )


def slow_ranks(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """No rank multiplies matrices at less than half the median speed, because all ranks wait for
    the slowest.
    """
    middle = statistics.median(facts.flops for facts in ranks)
    for facts in ranks:
        if facts.flops * SLOW_RANK < middle:
            yield Problem(
                f"slow rank {facts.rank} on {facts.host}: {facts.flops / 1e9:,.1f} GFLOP/s, the "
                f"median is {middle / 1e9:,.1f}",
                False,
            )


def slow_links(ranks: Sequence[Facts]) -> Iterator[Problem]:
    """No link is far slower than the better links of its kind (inside a node, between nodes)."""
    hosts = [facts.host for facts in ranks]
    for away in (False, True):
        best: dict[tuple[str, str], LinkSpeed] = {}
        for link in (link for facts in ranks for link in facts.links):
            pair = hosts[link.sender], hosts[link.receiver]
            if (pair[0] != pair[1]) == away and (pair not in best or link.rate > best[pair].rate):
                best[pair] = link
        if not best:
            continue
        good = (
            max(link.rate for link in best.values())
            if len(best) < 4
            else statistics.quantiles([x.rate for x in best.values()])[2]
        )
        for (sender, receiver), link in sorted(best.items()):
            if link.rate * SLOW_LINK < good:
                yield Problem(
                    f"slow link {sender} -> {receiver} (hop {link.hop}, rank {link.sender} to "
                    f"{link.receiver}): {link.rate / 1e6:,.1f} MB/s, better links "
                    f"{good / 1e6:,.1f}",
                    False,
                )


def summary(ranks: Sequence[Facts]) -> Iterator[str]:
    """One line per hop: bandwidth, latency and the slowest link; and one for each class of links
    between any two ranks.
    """
    links = [link for facts in ranks for link in facts.links]
    hosts = [facts.host for facts in ranks]
    for hop in sorted({link.hop for link in links}):
        mine = [link for link in links if link.hop == hop]
        slow = min(mine, key=lambda link: link.rate)
        latency = statistics.median(link.latency for link in mine)
        yield (
            f"hop {hop}: {slow.rate / 1e6:,.1f} to {max(link.rate for link in mine) / 1e6:,.1f} "
            f"MB/s, {latency * 1e6:,.0f} us; slowest from rank {slow.sender} "
            f"({hosts[slow.sender]}) to rank {slow.receiver} ({hosts[slow.receiver]})"
        )
    pairs = [link for facts in ranks for link in facts.pairs]
    for name, of in by_class(hosts, pairs).items():
        yield (
            f"links {name}: {of['links']} measured, {of['slowest_gb_s'] * 1e3:,.1f} to "
            f"{of['fastest_gb_s'] * 1e3:,.1f} MB/s, {of['latency_us']:,.0f} us"
        )
    if pairs and len(pairs) < len(ranks) * (len(ranks) - 1):
        yield (
            f"{len(pairs)} of {len(ranks) * (len(ranks) - 1)} links were measured in the time that "
            "preflight has"
        )


def _one_per_host(ranks: Sequence[Facts]) -> list[Facts]:
    return list({facts.host: facts for facts in reversed(ranks)}.values())[::-1]
