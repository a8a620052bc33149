"""`--cp-ring-heads auto`: the fastest number of ranks that exchange heads, from a job's flags.

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
from cp_ring.plan.routes import AUTO
from cp_ring.plan.sizes.attention_sizes import AttentionSizes

_CHOSEN_BY = 64  # ranks


def settle(
    config: Options,
    named: Mapping[str, Any],
    cp: int,
    sizes: AttentionSizes,
    ranks: Sequence[int],
    per_node: int | None = None,
    windows: LayerWindows = (((-1, -1), 1),),
) -> tuple[Options, str]:
    """The settings with a number of heads in place of `auto`, and why, in one line; "" where it is
    not `auto`.

    named: Megatron's settings by name. ranks: those of the context-parallel group in the whole job.
    per_node: consecutive ranks of the job on each node, by default what the launcher says. windows:
    those of the layers.

    The model knows neither documents nor masks that batches carry: it takes a causal mask. With
    more ranks than 64 it chooses for 64, with as many tokens each. Raises `ConfigError` with the
    flag where no number is possible.
    """
    if config.heads != AUTO:
        return config, ""
    if cp == 1:
        return replace(config, heads=1), ""
    from cp_ring.plan.cost import fastest_heads

    node = node_size(ranks, per_node or ranks_per_node())
    kinds = named.get("cp_comm_type") or ["p2p"]
    levels = named.get("hierarchical_context_parallel_sizes")
    asked = replace(config, heads=1)
    specs = [
        spec_of_layer(kind, asked, cp, levels)
        for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ]
    few = min(cp, max(_CHOSEN_BY - _CHOSEN_BY % node, node))
    n = int(named.get("seq_length") or 1) // cp * few
    schedule = "gather" if any(spec.schedule == "gather" for spec in specs) else AUTO
    try:
        spec = PlanSpec("zigzag", schedule=schedule)
        layers = [(Mask.causal(n, window), count) for window, count in windows]
        heads, seconds = fastest_heads(layers, few, spec, sizes, node)
    except PlanError as error:
        raise ConfigError(f"{config.flag('heads')} {AUTO}: {error}") from None
    others = sorted((time, other) for other, time in seconds.items() if other != heads)
    times = [
        f"heads {other} {1e3 * time:.3g} ms"
        for time, other in [(seconds[heads], heads), *others[:2]]
    ]
    return (
        replace(config, heads=heads),
        f"chosen by predicted time of attention of a step of one sequence, nodes of {node} "
        f"context-parallel ranks: {'; '.join(times)}",
    )
