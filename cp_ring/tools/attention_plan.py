"""How the attention of a job is split, before the job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_ring.comm.nodes import node_size
from cp_ring.megatron.flags.comm_types import spec_of_layer
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.job import JobConfig

if TYPE_CHECKING:
    from cp_ring.options import Options


def first_layer(job: JobConfig, settings: Options) -> tuple[PlanSpec, str]:
    """How attention of the first layer is split with these settings, and its communication type."""
    kinds = job.megatron.get("cp_comm_type") or "p2p"
    kind = kinds if isinstance(kinds, str) else kinds[0]
    sizes = job.megatron.get("hierarchical_context_parallel_sizes")
    return spec_of_layer(kind, settings, job.parallel.context_parallel_size, sizes), kind


def node_size_of(job: JobConfig, settings: Options, per_node: int) -> int:
    """The neighboring context-parallel ranks of a node: as set, or by so many ranks of a node."""
    tp, cp = job.parallel.tensor_model_parallel_size, job.parallel.context_parallel_size
    first_group = [*range(0, tp * cp, tp)]
    return settings.node_size or node_size(first_group, per_node)


def sizes_of(job: JobConfig) -> AttentionSizes:
    """Heads of one tensor-parallel rank, and the dtype, from Megatron's settings."""
    return AttentionSizes.from_megatron(job.megatron, job.parallel.tensor_model_parallel_size)
