"""The settings of calls of attention: their names, defaults, values, and help.

They are keywords of `ring_attention` and flags of a job; a job has more flags of its own
(`cp_ring.megatron.options`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.layout import LAYOUTS, MAX_RANKS
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS, parse, text
from cp_ring.plan.sizes.attention_sizes import WIRES


def _kernels() -> tuple[str, ...]:
    # loads torch, which a command line that names no kernel does without
    from cp_ring.kernels import REGISTRY

    return ("auto", *REGISTRY)


def setting(default: Any, text: str, **limits: Any) -> Any:
    """Make a setting with its help.

    choices: the names that it accepts, or a function that returns those registered by now.
    words: names that it accepts beside numbers.
    least, most: the range of its numbers.
    convert: makes a value from the types of a YAML file.
    check: raises `ConfigError` for a value that the setting cannot have.
    """
    return field(default=default, metadata={"text": text, **limits})


def schedule_text(value: Any) -> Any:
    """Return a schedule as text; a YAML list [0, 1, 2, 2] becomes 0,1,2,2."""
    if not isinstance(value, str | list | tuple):
        return value
    try:
        return text(parse(text(value)))
    except PlanError as error:
        raise ConfigError(str(error).partition(": ")[2]) from None


NUM_SLOTS = (2, 8)
"""The fewest and the most receive buffers."""

WIRE_DTYPES = ("input", "float32", "bfloat16")


@dataclass(frozen=True)
class CallSettings:
    """The settings that all callers of attention share."""

    kernel: str = setting(
        "auto",
        "Attention kernel of each tile; auto takes the fastest one that supports the tensors.",
        choices=_kernels,
    )
    layout: str = setting(
        "zigzag",
        "Split of tokens over ranks: zigzag, as Megatron does; contiguous; balanced, by the "
        "work of documents, masks and the windows of all layers.",
        choices=lambda: tuple(LAYOUTS),
    )
    route: str = setting(
        "direct",
        "Way of keys and values to the ranks that need them: direct, from their owner; ring, "
        "from neighbor to neighbor.",
        choices=lambda: tuple(ROUTES),
    )
    schedule: str = setting(
        "auto",
        "Hop at which a rank uses the keys of each other rank: auto; ring, one source a hop; "
        "gather, all in one hop; or the hop of each ring distance, as in 0,1,2,2.",
        convert=schedule_text,
    )
    slot_shards: int = setting(
        SLOT_SHARDS,
        "Maximum number of source ranks per hop (KV shards per receive buffer).",
        least=1,
        most=MAX_RANKS,
    )
    heads: int | str = setting(
        "auto",
        "Ulysses degree, the number of context-parallel ranks that exchange tokens for heads: 1 "
        "is ring only; auto is 1 inside one node, and else the fastest divisor of a node's "
        "ranks for each mask.",
        least=1,
        words=("auto",),
    )
    num_slots: int = setting(
        2,
        "Number of receive buffers for keys and values; memory grows with it.",
        least=NUM_SLOTS[0],
        most=NUM_SLOTS[1],
    )
    wire: str = setting(
        "auto",
        "Encoding of keys and values on the wire: plain, unchanged; latent, the MLA latents; "
        "int8 or fp8, quantized per token and head, at a cost in accuracy; auto is latent where "
        "the time model predicts a gain, else plain.",
        choices=lambda: ("auto", *WIRES),
    )
    wire_dtype: str = setting(
        "input",
        "Precision of partial key and value gradients on the wire.",
        choices=WIRE_DTYPES,
    )

    @property
    def widening(self) -> float:
        """Return the number by which bounds of the certificate widen because of the codec."""
        # `auto` never chooses one that costs accuracy
        return WIRES.get(self.wire, WIRES["plain"]).widening

    @property
    def rounding(self) -> bool:
        """Return True if partial gradients travel in bfloat16 whatever the input is."""
        return self.wire_dtype == "bfloat16"


def either(names: Sequence[str]) -> str:
    """Return the names as part of a sentence: 'a', 'b' or 'c'."""
    return " or ".join(", ".join(map(repr, names)).rsplit(", ", 1))
