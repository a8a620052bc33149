"""What makes two plans the same plan: equal digests of their masks and layouts, and equal settings."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.tables import PlanTables

_MAX_WORDS = 80


class Part(NamedTuple):
    """A part of a plan's identity. Parts are equal where `content` is; `words` describe the part
    for a person.
    """

    name: str
    content: str
    words: str


def identity(plan: PlanTables) -> tuple[Part, ...]:
    """The parts from which a plan is made: mask, layout, route, and each further setting among the
    fields of `PlanTables`.

    The tables are left out: they follow from these parts, and `Plan.build_rank_plan` makes one
    rank's share of them only.
    """
    parts = []
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Mask | Layout):
            parts.append(Part(field.name, value.digest, repr(value)))
        elif value is None or isinstance(value, str | int | float | tuple):
            words = str(value)
            parts.append(
                Part(
                    field.name,
                    repr(value),
                    words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "...",
                )
            )
    return tuple(parts)
