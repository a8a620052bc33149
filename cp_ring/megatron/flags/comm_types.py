"""Reads the comm types of all layers from Megatron's arguments."""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.adapter.comm_types import known, spec_of_layer
from cp_ring.megatron.options import Options
from cp_ring.plan.plan import PlanSpec


def types_by_layer(args: Any) -> list[str]:
    """Return the comm type of each layer from parsed flags; a single entry if all layers have the
    same one.
    """
    kinds = getattr(args, "cp_comm_type", None) or "p2p"
    return [known(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)]


def type_of(args: Any, layer: int) -> str:
    """Return the comm type of layer `layer`, counted from 1."""
    kinds = types_by_layer(args)
    return kinds[0] if len(kinds) == 1 else kinds[layer - 1]


def specs(args: Any, config: Options) -> list[tuple[str, PlanSpec]]:
    """Return the distinct comm types of the layers, each with its plan specification."""
    asked = Asked(args)
    kinds = dict.fromkeys(types_by_layer(args))
    return [(kind, spec_of_layer(kind, config, args, asked.tp, asked.cp)) for kind in kinds]
