"""`cp-ring bench nodes`: shapes of context parallelism on two nodes of two ranks each, with a slow
link between the nodes.

The nodes are network namespaces on this machine. Ranks of a node talk over its loopback device, the
nodes over a throttled wire. The speed of the wire is a share of what hiding would need under
`direct`: at 1, the bytes that `direct` sends out of a node in forward and backward take as long as
all of forward and backward do on the free (unthrottled) wire.
"""

from __future__ import annotations

from typing import Any

from cp_ring import Mask
from cp_ring.observe.counters import record
from cp_ring.plan.costs.cost import crossing
from cp_ring.plan.costs.shapes import planned
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.bench.contestants import Contest
from cp_ring.tools.job.speeds import PREPARED, in_turn, throttled_link

NODES, NODE_SIZE = 2, 2
SHAPES = {
    spec.name: spec
    for spec in (
        PlanSpec(node_size=NODE_SIZE),
        PlanSpec(route="relay", node_size=NODE_SIZE),
        PlanSpec(ulysses=2, node_size=NODE_SIZE),
    )
}


def plan_of(name: str, contest: Contest, full: bool) -> Plan:
    """The plan of a shape in `SHAPES`."""
    mask = Mask.full(contest.n) if full else Mask.causal(contest.n)
    return planned(mask, contest.cp, SHAPES[name])


def prepare_shape(group: Any, name: str, contest: Contest, full: bool) -> int:
    """On a rank: makes a shape's round and runs it once; returns the bytes that this rank sent to
    the other node.
    """
    PREPARED[name] = contest.round_of(plan_of(name, contest, full), group)
    with record() as counters:
        PREPARED[name]()
    return sum(
        n
        for peer, n in counters.bytes_by_peer.items()
        if peer // NODE_SIZE != group.rank() // NODE_SIZE
    )


def planned_bytes(name: str, contest: Contest, full: bool) -> int:
    """Bytes between the nodes in forward and backward, by the plan: keys in both, gradients in
    backward.
    """
    sizes = AttentionSizes(contest.heads, contest.heads, contest.head_dim, dtype="fp32")
    moved = crossing(plan_of(name, contest, full), sizes, NODE_SIZE)
    return 2 * moved.keys + moved.gradients + 2 * moved.exchange


def run(contest: Contest, repeats: int, share: float, full: bool) -> list[dict[str, Any]]:
    """Results {shape, median_s, min_s, max_s, free_s, over_direct, bytes_between_nodes,
    planned_bytes_between_nodes, bytes_per_s}.

    Times are those of forward and backward on the slowest rank, `free_s` on the free wire. Each
    round runs each shape once. `over_direct` is the time of `direct` divided by that of the shape.
    Raises `NoNamespacesError`.
    """
    with throttled_link(NODE_SIZE) as (ranks, throttle):
        results: list[dict[str, Any]] = [
            {"shape": name, "planned_bytes_between_nodes": planned_bytes(name, contest, full)}
            for name in SHAPES
        ]
        for result in results:
            sent = ranks.run(prepare_shape, contest.cp, result["shape"], contest, full)
            result["bytes_between_nodes"] = sum(sent)
        pools = {name: (ranks, contest.cp, name) for name in SHAPES}
        free = in_turn(pools, repeats)
        needed = results[0]["bytes_between_nodes"] / NODES / free["direct"]["median_s"]
        throttle(share * needed)
        slow = in_turn(pools, repeats)
    for result in results:
        name = result["shape"]
        result |= slow[name]
        result |= {"free_s": free[name]["median_s"], "bytes_per_s": share * needed}
        result["over_direct"] = slow["direct"]["median_s"] / result["median_s"]
    return results
