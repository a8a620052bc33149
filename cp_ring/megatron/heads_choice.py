"""Whether the number of ranks that exchange heads is chosen for each microbatch of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.megatron.attention_sizes import attention_sizes
from cp_ring.megatron.options import Options
from cp_ring.plan.cost import heads_to_try
from cp_ring.plan.plan import HeadsChoice, PlanSpec
from cp_ring.plan.schedule import parse


def with_choice(
    spec: PlanSpec, kind: str | None, settings: Options, model: Any, tp: int, group: Any
) -> PlanSpec:
    """How attention of a layer is split over the ranks of `group`, by the formula for each mask
    where `--cp-ring-heads` is `auto` and the group spans nodes.

    kind: Megatron's `cp_comm_type` of the layer, whose other types name their own exchange. model:
    Megatron's arguments, or the configuration of a layer. Latents have no heads to exchange, and a
    schedule of hops is for one number of members.
    """
    latent = getattr(model, "multi_latent_attention", False) and settings.wire != "plain"
    named = isinstance(parse(settings.schedule), str)
    if settings.heads != "auto" or kind not in (None, "p2p") or latent or not named:
        return spec
    cp = group.size()
    near = node_size(dist.get_process_group_ranks(group), ranks_per_node()) if cp > 1 else 1
    if not 1 < near < cp:
        return spec
    # a configuration has key/value heads in any case, arguments where they are grouped
    values = {"group_query_attention": True, **vars(model)}
    sizes = replace(attention_sizes(values, tp), batch=1)
    return replace(spec, choice=HeadsChoice(sizes, near))


def every_choice(spec: PlanSpec, cp: int) -> list[PlanSpec]:
    """The ways in which attention by `spec` may be split over `cp` ranks, whatever the mask."""
    if spec.choice is None:
        return [spec]
    numbers = heads_to_try(cp, spec.choice.sizes, spec.choice.ranks_per_node)
    return [replace(spec, ulysses=heads, choice=None) for heads in numbers]
