"""The plan of a job's attention, before the job runs: the bytes between nodes, and the predicted
time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cp_ring.comm.nodes import node_size
from cp_ring.errors import ConfigError
from cp_ring.megatron.flags import shape_choice
from cp_ring.megatron.flags.comm_types import spec_of_layer
from cp_ring.plan.costs.simulate import Timeline, simulate
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec, plan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.job.job_config import JobConfig
from cp_ring.tools.slurm.placement import (
    Placement,
    context_groups,
    describe,
    members_of,
    traffic,
)

if TYPE_CHECKING:
    from cp_ring.options import Options
    from cp_ring.plan.sizes.device_rates import Rates


def plan_of(job: JobConfig, per_node: int = 1) -> Plan:
    """The plan of the first layer, without a window, for one causal sequence; with documents
    attention moves no more than this.

    `per_node` consecutive ranks of the job share a node, from which the order of the hops follows.
    """
    n = job.megatron.get("seq_length")
    cp = job.parallel.context_parallel_size
    if not isinstance(n, int) or n < 1:
        raise ConfigError(
            f"megatron.seq_length {n!r}: it must be the number of tokens of a sequence"
        )
    named = job.cp_ring.named_layout
    layout = named(Mask.full(n), cp) if named.fixed else Layout.zigzag(n, cp)
    settings, _ = shape_choice.settle(
        job.cp_ring, job.megatron, cp, sizes_of(job), _first_group(job), per_node
    )
    settings = replace(settings, node_size=node_size_of(job, settings, per_node))
    return plan(Mask.causal(n), cp, replace(first_layer(job, settings)[0], layout=layout))


def first_layer(job: JobConfig, settings: Options) -> tuple[PlanSpec, str]:
    """How attention of the first layer is split with these settings, and its communication type."""
    kinds = job.megatron.get("cp_comm_type") or "p2p"
    kind = kinds if isinstance(kinds, str) else kinds[0]
    sizes = job.megatron.get("hierarchical_context_parallel_sizes")
    return spec_of_layer(kind, settings, job.parallel.context_parallel_size, sizes), kind


def node_size_of(job: JobConfig, settings: Options, per_node: int) -> int:
    """The neighboring context-parallel ranks of a node: as set, or by so many ranks of a node."""
    return settings.node_size or node_size(_first_group(job), per_node)


def _first_group(job: JobConfig) -> list[int]:
    tp, cp = job.parallel.tensor_model_parallel_size, job.parallel.context_parallel_size
    ranks: list[int] = context_groups(tp, cp, tp * cp)[0].tolist()
    return ranks


def sizes_of(job: JobConfig) -> AttentionSizes:
    """Heads of one tensor-parallel rank, and the dtype, from Megatron's settings."""
    return AttentionSizes.from_megatron(job.megatron, job.parallel.tensor_model_parallel_size)


def describe_job(job: JobConfig, placement: Placement) -> list[str]:
    """Lines to print: the nodes of the context-parallel ranks, the exchange of heads, and the hops
    between nodes.
    """
    cp = job.parallel.context_parallel_size
    if cp == 1:
        return ["context parallel size 1: no hops"]
    groups = context_groups(job.parallel.tensor_model_parallel_size, cp, placement.ranks)
    whole = plan_of(job, placement.per_node)
    sizes = sizes_of(job)
    rings = members_of(groups, whole.ulysses)
    hops = traffic(whole.ring, rings, placement, sizes.of_rank(whole.ulysses).on_wire()[0])
    if whole.ulysses == 1:
        return describe(placement, groups, hops)
    first = groups[0][: whole.ulysses].tolist()
    alone = len({placement.host(rank) for rank in first}) == 1
    exchange = (
        f"{whole.ulysses} neighboring ranks exchange heads, "
        f"{'inside a node' if alone else 'between nodes'}"
    )
    return [f"{exchange}; the ring has {whole.ring.cp} members", *describe(placement, groups, hops)]


def predict(job: JobConfig, rates: Rates, per_node: int) -> Timeline:
    """Predicts from measured speeds: of matrix products on the slowest rank, and of the slowest
    links of each class.
    """
    whole = plan_of(job, per_node)
    near = node_size(_first_group(job), per_node)
    return simulate(whole, whole.verify(job.cp_ring.num_slots), sizes_of(job), rates, near)
