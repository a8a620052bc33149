"""Lets a plan choose for each microbatch how many ranks exchange heads (`--cp-ring-heads auto`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cp_ring.options import CallSettings
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import parse
from cp_ring.plan.time import Conditions


def with_choice(
    spec: PlanSpec,
    kind: str | None,
    settings: CallSettings,
    config: Any,
    tp: int,
    cp: int,
    near: int,
) -> PlanSpec:
    """Return the plan specification of a layer over `cp` ranks, of which `near` share a node. With
    `--cp-ring-heads auto` and several nodes, a formula chooses the number of ranks that exchange
    heads for each mask.

    kind: the layer's `cp_comm_type`. Types other than p2p set the exchange themselves.
    config: Megatron's arguments, or its configuration of the layer.

    Nothing is chosen with latents, which have no heads to exchange, or with a schedule of hops,
    which fits one ring size only.
    """
    if (
        settings.heads != "auto"
        or kind not in (None, "p2p")
        or (config.multi_latent_attention and settings.wire != "plain")
        or not isinstance(parse(settings.schedule), str)
        or not 1 < near < cp
    ):
        return spec
    from cp_ring.megatron.adapter.attention_sizes import attention_sizes  # few groups span nodes

    sizes = replace(attention_sizes(config, tp), batch=1)
    return replace(spec, choice=Conditions(sizes, node=near))


def every_choice(spec: PlanSpec, cp: int) -> list[PlanSpec]:
    """Return every plan specification that `spec` may become over `cp` ranks, for any mask."""
    if spec.choice is None:
        return [spec]
    return [replace(spec, ulysses=heads, choice=None) for heads in spec.choice.heads_to_try(cp)]
