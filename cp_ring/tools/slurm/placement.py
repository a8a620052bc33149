"""Which rank runs on which node, and which hops and bytes of a ring plan pass between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_ring.errors import ConfigError
from cp_ring.plan.ranges import Ints
from cp_ring.plan.tables import PlanTables


@dataclass(frozen=True)
class Placement:
    """`per_node` ranks on each of `hosts`, in this order: rank r is on hosts[r // per_node]."""

    hosts: tuple[str, ...]
    per_node: int

    def __post_init__(self) -> None:
        if not self.hosts or self.per_node < 1:
            raise ConfigError(
                f"{len(self.hosts)} hosts of {self.per_node} ranks: there must be at least one of "
                "each"
            )
        twice = {host for host in self.hosts if self.hosts.count(host) > 1}
        if twice:
            raise ConfigError(f"the order of hosts names {min(twice)} twice")

    @property
    def ranks(self) -> int:
        return len(self.hosts) * self.per_node

    @property
    def nodes(self) -> Ints:
        """The index of each rank's host; int64 [ranks]."""
        return np.arange(self.ranks) // self.per_node

    def host(self, rank: int) -> str:
        return self.hosts[rank // self.per_node]


def context_groups(tp: int, cp: int, world: int) -> Ints:
    """The context-parallel groups of Megatron's rank order (tensor ranks next to each other, then
    context ranks).

    Returns int64 [world / cp, cp]: the ranks of each group, in order. The order of pipeline and
    data ranks does not matter.
    """
    if world % (tp * cp):
        raise ConfigError(f"tensor {tp} x context {cp} parallel size does not divide {world} ranks")
    ranks = np.arange(world).reshape(-1, cp, tp)
    return ranks.transpose(0, 2, 1).reshape(-1, cp)


def members_of(groups: Ints, heads: int) -> Ints:
    """The rings of context-parallel groups in which each `heads` neighboring ranks exchange heads:
    int64 [rings, members].
    """
    cp = groups.shape[1]
    return groups.reshape(-1, cp // heads, heads).transpose(0, 2, 1).reshape(-1, cp // heads)


@dataclass(frozen=True)
class HopTraffic:
    """Keys and values that all groups together move at a hop of one layer's forward pass, in bytes.

    `inside` stay within a node, `between` go to another node. `out` leave each node and `into`
    reach it, int64 [nodes].
    """

    hop: int
    inside: int
    between: int
    out: Ints
    into: Ints

    @property
    def busiest(self) -> int:
        """Index of the node whose network moves most."""
        return int(np.maximum(self.out, self.into).argmax())


def traffic(
    plan: PlanTables,
    groups: Ints,
    placement: Placement,
    token_bytes: int,
) -> list[HopTraffic]:
    """The traffic of each hop that moves keys. `token_bytes`: bytes of the keys and values of one
    token.
    """
    if groups.shape[1] != plan.cp or groups.max() >= placement.ranks:
        raise ConfigError(
            f"groups of {groups.shape[1]} among {groups.max() + 1} ranks; the plan is for {plan.cp}"
        )
    moves = plan.transfers
    count = len(placement.hosts)
    # [groups, transfers]
    sender, receiver = (placement.nodes[groups[:, side]] for side in (moves.sender, moves.receiver))
    size = np.broadcast_to(moves.tokens * token_bytes, sender.shape)
    hops = []
    for hop in np.unique(moves.hop).tolist():
        now = moves.hop == hop
        source, target, amount = (
            sender[:, now].ravel(),
            receiver[:, now].ravel(),
            size[:, now].ravel(),
        )
        away = source != target
        out, into = (
            np.bincount(nodes[away], amount[away], minlength=count).astype(np.int64)
            for nodes in (source, target)
        )
        hops.append(HopTraffic(hop, int(amount[~away].sum()), int(amount[away].sum()), out, into))
    return hops


def describe(placement: Placement, groups: Ints, hops: Sequence[HopTraffic]) -> list[str]:
    """Lines to print: the nodes of the first group, and the hops between nodes."""
    cp = groups.shape[1]
    nodes_of_group = [len(set(placement.nodes[group].tolist())) for group in groups]
    line = (
        f"each of {len(groups)} context-parallel groups of {cp} is on {_range(nodes_of_group)} of "
        f"{len(placement.hosts)} nodes"
    )
    lines = [
        line,
        "the first on "
        + " ".join(placement.host(int(rank)) for rank in groups[0][:16])
        + (" ..." if cp > 16 else ""),
    ]
    if not any(hop.between for hop in hops):
        return [*lines, "no hop passes between nodes"]
    for hop in hops:
        if hop.between:
            node = hop.busiest
            lines.append(
                f"hop {hop.hop}: {_mib(hop.between)} of {_mib(hop.between + hop.inside)} per layer "
                f"pass between nodes; {placement.hosts[node]} sends {_mib(int(hop.out[node]))}, "
                f"receives {_mib(int(hop.into[node]))}"
            )
    local = [str(hop.hop) for hop in hops if not hop.between]
    return [*lines, *[f"inside nodes alone: hops {', '.join(local)}"] * bool(local)]


def _range(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
