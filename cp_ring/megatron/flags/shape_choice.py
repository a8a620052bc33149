"""`--cp-ring-route auto` and `--cp-ring-heads auto`: the fastest shape that memory allows, from a
job's flags.

Nothing heavy is imported here: a job is also described before torch and Megatron are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.flags.comm_types import spec_of_layer
from cp_ring.megatron.settings import LayerWindows
from cp_ring.options import Options
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.routes import AUTO, DEFAULT
from cp_ring.plan.sizes.attention_sizes import AttentionSizes


def settle(
    config: Options,
    named: Mapping[str, Any],
    cp: int,
    sizes: AttentionSizes,
    ranks: Sequence[int],
    per_node: int | None = None,
    windows: LayerWindows = (((-1, -1), 1),),
) -> tuple[Options, str]:
    """The settings with a route and a number of heads in place of `auto`, and why, in one line; ""
    where none is `auto`.

    named: Megatron's settings by name. ranks: those of the context-parallel group in the whole job.
    per_node: consecutive ranks
    of the job on each node, by default what the launcher says. windows: those of the layers.

    The model knows neither documents nor masks that batches carry: it takes a causal mask. With
    more ranks than 64 it chooses for 64, with as many tokens each. Raises `ConfigError` with the
    flag where no shape fits into memory.
    """
    if AUTO not in (config.route, config.heads):
        return config, ""
    if cp == 1:
        return replace(config, route=DEFAULT, heads=1), ""
    from cp_ring.plan.costs.shapes import CHOSEN_BY, Assumed, choose

    node = config.node_size or node_size(ranks, per_node or ranks_per_node())
    kinds = named.get("cp_comm_type") or ["p2p"]
    heads: int | str = 1 if config.heads == AUTO else config.heads
    asked = replace(config, route=DEFAULT, node_size=node, heads=heads)
    levels = named.get("hierarchical_context_parallel_sizes")
    specs = [
        spec_of_layer(kind, asked, cp, levels)
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ]
    gather = any(spec.schedule == "gather" for spec in specs)
    heads = AUTO if config.heads == AUTO else specs[0].ulysses
    few, near = min(cp, max(CHOSEN_BY - CHOSEN_BY % node, node)), node
    n = int(named.get("seq_length") or 1) // cp * few
    if config.heads != AUTO and few % specs[0].ulysses:
        few, n = cp, int(named.get("seq_length") or 1)
    layers = [(Mask.causal(n, window), count) for window, count in windows]
    try:
        schedule, shards = ("gather", few) if gather else (config.schedule, config.slot_shards)
        spec = PlanSpec("zigzag", config.route, schedule, node_size=near, slot_shards=shards)
        choice = choose(layers, few, spec, Assumed(sizes, ranks_per_node=near), heads)
    except PlanError as error:
        flags = {"slot_shards": config.flag("slot_shards"), "heads=": config.flag("heads") + " "}
        said = str(error)
        for name, flag in flags.items():
            said = said.replace(name, flag)
        raise ConfigError(
            f"{config.flag('route')} {config.route}, {config.flag('heads')} {config.heads}: {said}"
        ) from None
    heads = choice.shape.ulysses if config.heads == AUTO else config.heads
    reason = choice.reason.replace("slot_shards", config.flag("slot_shards"))
    return (
        replace(config, route=choice.shape.route, heads=heads),
        f"chosen by predicted time, nodes of {node} context-parallel ranks: {reason}",
    )
