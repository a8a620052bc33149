"""What makes two plans the same plan: equal digests of their masks and layouts, and equal settings."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import NamedTuple

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.tables import PlanTables

_MAX_WORDS = 80


class Part(NamedTuple):
    """A part of a plan's identity. Parts are equal where `content` is; `words` describe the part for a person."""

    name: str
    content: str
    words: str


def identity(plan: PlanTables) -> tuple[Part, ...]:
    """The parts from which a plan is made: mask, layout, route, and each further setting among the fields of `PlanTables`.

    The tables are left out: they follow from these parts, and `RingPlan.build_rank_plan` makes one rank's share of them only.
    """
    parts = []
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Mask):
            parts.append(Part(field.name, digest_of_mask(value), repr(value)))
        elif isinstance(value, Layout):
            parts.append(Part(field.name, digest_of_layout(value), repr(value)))
        elif value is None or isinstance(value, str | int | float | tuple):
            words = str(value)
            parts.append(Part(field.name, repr(value), words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."))
    return tuple(parts)


def digest_of_mask(mask: Mask) -> str:
    """Equal for equal masks with equal positions, whatever they are called."""
    positions = b"" if mask.segments is None else mask.segments.tobytes()
    return _digest(f"{mask.n} {mask.pieces.data.shape} ".encode(), mask.pieces.data.tobytes(), positions)


def digest_of_layout(layout: Layout) -> str:
    """Equal for equal layouts, whatever they are called."""
    sizes = f"{layout.n} {layout.cp} {layout.rows} {len(layout.owner)} "
    return _digest(sizes.encode(), layout.edges.tobytes(), layout.owner.tobytes())


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()
