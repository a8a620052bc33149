"""The plan of a job's attention, before the job runs: the bytes between nodes, and the predicted time."""

from __future__ import annotations

from cp_ring.comm.nodes import node_size
from cp_ring.errors import ConfigError
from cp_ring.job.config import JobConfig
from cp_ring.megatron import shape_choice
from cp_ring.megatron.comm_types import ring_shape
from cp_ring.plan import heads as head_plans
from cp_ring.plan.heads import HeadPlan
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.rates import Rates
from cp_ring.plan.ring_plan import RingPlan
from cp_ring.plan.simulate import Timeline, simulate
from cp_ring.plan.sizes import AttentionSizes
from cp_ring.slurm.placement import Placement, context_groups, describe, members_of, token_bytes, traffic


def plan_of(job: JobConfig, per_node: int = 1) -> RingPlan | HeadPlan:
    """The plan of the first layer, without a window, for one causal sequence; with documents attention moves no more than this.

    `per_node` consecutive ranks of the job share a node, from which the order of the hops follows.
    """
    n, cp = job.megatron.get("seq_length"), job.parallel.context_parallel_size
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"megatron.seq_length {n!r}: it must be the number of tokens of a sequence")
    layout = Layout.contiguous(n, cp) if job.cp_ring.layout == "contiguous" else Layout.zigzag(n, cp)
    tp, given = job.parallel.tensor_model_parallel_size, job.megatron
    group = context_groups(tp, cp, tp * cp)[0].tolist()
    settings, _ = shape_choice.settle(job.cp_ring, given, cp, sizes_of(job), group, per_node)
    settings = settings.model_copy(update={"node_size": settings.node_size or node_size(group, per_node)})
    kinds = given.get("cp_comm_type") or "p2p"
    kind = kinds if isinstance(kinds, str) else kinds[0]
    shape = ring_shape(kind, settings, cp, given.get("hierarchical_context_parallel_sizes"))
    return head_plans.plan_of(Mask.causal(n), layout, route=settings.route, **shape._asdict())


def sizes_of(job: JobConfig) -> AttentionSizes:
    """Heads of one tensor-parallel rank, and the dtype, from Megatron's settings."""
    return shape_choice.attention_sizes(job.megatron, job.parallel.tensor_model_parallel_size)


def describe_job(job: JobConfig, placement: Placement) -> list[str]:
    """Lines to print: the nodes of the context-parallel ranks, the exchange of heads, and the hops between nodes."""
    cp = job.parallel.context_parallel_size
    if cp == 1:
        return ["context parallel size 1: no hops"]
    groups = context_groups(job.parallel.tensor_model_parallel_size, cp, placement.ranks)
    plan, sizes = plan_of(job, placement.per_node), sizes_of(job)
    if plan.heads == 1:
        return describe(placement, groups, traffic(plan.ring, groups, placement, token_bytes(sizes)))
    rings = members_of(groups, plan.heads)
    hops = traffic(plan.ring, rings, placement, token_bytes(sizes.of_rank(plan.heads)))
    first = groups[0][: plan.heads].tolist()
    alone = len({placement.host(rank) for rank in first}) == 1
    exchange = f"{plan.heads} neighboring ranks exchange heads, {'inside a node' if alone else 'between nodes'}"
    return [f"{exchange}; the ring has {plan.ring.cp} members", *describe(placement, groups, hops)]


def predict(job: JobConfig, rates: Rates, per_node: int) -> Timeline:
    """Predicts from measured speeds: of matrix products on the slowest rank, and of the slowest links of each class."""
    plan = plan_of(job, per_node)
    tp, cp = job.parallel.tensor_model_parallel_size, job.parallel.context_parallel_size
    near = node_size(context_groups(tp, cp, tp * cp)[0].tolist(), per_node)
    return simulate(plan, plan.verify(job.cp_ring.num_slots), sizes_of(job), rates, near)
