"""Lets a plan choose for each microbatch how many ranks exchange heads (`--cp-ring-heads auto`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.options import CallSettings
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import parse
from cp_ring.plan.time import Conditions


def with_choice(
    spec: PlanSpec, kind: str | None, settings: CallSettings, config: Any, tp: int, group: Any
) -> PlanSpec:
    """Return the plan specification of a layer over the ranks of `group`. With `--cp-ring-heads
    auto` and a group that spans nodes, a formula chooses the number of ranks that exchange heads
    for each mask.

    kind: the layer's `cp_comm_type`. Types other than p2p set the exchange themselves.
    config: Megatron's configuration of the layer.

    Nothing is chosen with latents, which have no heads to exchange, or with a schedule of hops,
    which fits one ring size only.
    """
    latent = config.multi_latent_attention and settings.wire != "plain"
    if (
        settings.heads != "auto"
        or kind not in (None, "p2p")
        or latent
        or not isinstance(parse(settings.schedule), str)
    ):
        return spec
    cp = group.size()
    near = node_size(dist.get_process_group_ranks(group), ranks_per_node()) if cp > 1 else 1
    if not 1 < near < cp:
        return spec
    from cp_ring.megatron.adapter.attention_sizes import attention_sizes  # few groups span nodes

    # a configuration always has numbers of key/value heads, and has no name for that
    values = {"group_query_attention": True, **vars(config)}
    sizes = replace(attention_sizes(values, tp), batch=1)
    return replace(spec, choice=Conditions(sizes, node=near))


def every_choice(spec: PlanSpec, cp: int) -> list[PlanSpec]:
    """Return every plan specification that `spec` may become over `cp` ranks, for any mask."""
    if spec.choice is None:
        return [spec]
    return [replace(spec, ulysses=heads, choice=None) for heads in spec.choice.heads_to_try(cp)]
