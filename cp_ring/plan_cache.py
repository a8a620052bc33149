"""Makes a proven plan from the keywords of `ring_attention`, and keeps it for later calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.errors import ConfigError, expect
from cp_ring.options import CallSettings
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec, plan
from cp_ring.plan.ranges import Integers, offsets, window_of
from cp_ring.plan.routes import AUTO
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.time import Conditions
from cp_ring.runtime import RUNTIME

if TYPE_CHECKING:
    from cp_ring.comm.transport import Transport
    from cp_ring.inputs import Inputs
    from cp_ring.plan.records import RankPlan

_OF_PLANS = "mask, layout, route, schedule and heads"
_OF_MASKS = ("causal", "window_size", "cu_seqlens")
_OTHERS = ("layout", "route", "schedule", "heads")
Offsets = Integers | Tensor


@dataclass(frozen=True, eq=False)
class PlanOptions:
    """The keywords of `ring_attention` that decide the plan of a call; see there.

    Raises `ConfigError` for keywords that say the same thing twice, or are of the wrong type.
    """

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens: Offsets | None = None
    mask: Mask | None = None
    layout: str | Layout = CallSettings.layout
    route: str = CallSettings.route
    schedule: str | Sequence[int] = CallSettings.schedule
    heads: int | str = CallSettings.heads
    plan: Plan | RankPlan | None = None

    def __post_init__(self) -> None:
        mask, heads = self.mask, self.heads
        expect("causal", self.causal, bool)
        expect("route", self.route, str)
        expect("schedule", self.schedule, str, Sequence)
        expect("layout", self.layout, Layout, str)
        if not isinstance(self.window_size, Sequence) or len(self.window_size) != 2:
            raise ConfigError(
                f"window_size={self.window_size!r}: it must be (left, right), with -1 for an open "
                "side"
            )
        changed = [name for name in ("mask", *_OF_MASKS, *_OTHERS) if self._asks(name)]
        if self.plan is not None and changed:
            raise ConfigError(
                f"{changed[0]} and plan are both given, but a plan has its own {_OF_PLANS}: "
                "drop one"
            )
        if mask is not None:
            for name in changed:
                if name in _OF_MASKS:
                    raise ConfigError(
                        f"{name} and mask are both given, but a mask is complete by itself: drop "
                        "one"
                    )
            if not isinstance(mask, Mask):
                raise ConfigError(f"mask is a {type(mask).__name__}, not a Mask{_maker(mask)}")
        if heads != AUTO and (heads is True or not isinstance(heads, Integral) or heads < 1):
            raise ConfigError(f"heads={heads!r}: it must be a whole number above 0, or 'auto'")

    def _asks(self, name: str) -> bool:
        """Return True if a keyword has another value than its default."""
        value, default = getattr(self, name), getattr(PlanOptions, name)
        if value is default or default is None:
            return value is not default
        return bool((tuple(value) if name == "window_size" else value) != default)

    def _mask_of(self, tokens: int, cp: int) -> Mask:
        """Return the mask of a call in which this rank of `cp` holds `tokens` tokens."""
        if self.mask is not None:
            return self.mask
        layout, edges = self.layout, self.cu_seqlens
        end = layout.n if isinstance(layout, Layout) else None
        if edges is not None:
            edges = offsets(edges, "cu_seqlens", end).tolist()
        else:
            edges = [0, length_of(tokens, cp, str(layout)) if end is None else end]
        return _mask(tuple(edges), self.causal, window_of(self.window_size))

    def find(
        self,
        transport: Transport | None,
        inputs: Inputs,
        tokens_first: bool,
    ) -> Plan:
        """Return the plan of a call in which the rank of the transport passes `inputs`, which are
        checked: [batch, tokens, ...], or tokens first. Latents have no heads, and are not exchanged
        by default.

        Raises `ConfigError` or `PlanError` with a line that names the argument.
        """
        batch, tokens = inputs.q.shape[:2]
        if tokens_first:
            batch, tokens = tokens, batch
        rank, cp = (transport.rank, transport.size) if transport else (0, 1)
        layout = self.layout
        if isinstance(layout, Layout) and layout.cp != cp:
            raise ConfigError(f"layout is for {layout.cp} ranks, but the group has {cp}")
        mask = self._mask_of(tokens, cp)
        spec = PlanSpec(layout, self.route, self.schedule)
        if self.heads != AUTO:
            spec = replace(spec, ulysses=int(self.heads))
        elif inputs.latents is None and isinstance(self.schedule, str) and transport is not None:
            near = node_size(getattr(transport, "ranks", ()), ranks_per_node())
            if 1 < near < cp:
                spec = replace(spec, choice=Conditions(_sizes(inputs, batch), node=near))
        proven = plan(mask, cp, spec)
        layout = proven.layout
        held = int(layout.tokens_per_rank[rank])
        if layout.rows == 1 and held != tokens:
            name = "the sequence has" if self.cu_seqlens is None else "cu_seqlens ends at"
            raise ConfigError(
                f"{name} {layout.n} tokens, of which rank {rank} of {cp} holds {held}, but "
                f"q has {tokens} tokens of each batch row"
            )
        if layout.rows not in (1, batch):
            raise ConfigError(f"layout is for {layout.rows} batch rows, but q has {batch}")
        return proven


def _sizes(inputs: Inputs, batch: int) -> AttentionSizes:
    """Return the sizes for predicted times."""
    q, k, v, *_ = inputs
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(q.dtype, "fp32")
    return AttentionSizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype=dtype, batch=batch)


def _maker(mask: object) -> str:
    """Return how to make a `Mask` of an object that was given as one; "" if there is no way."""
    if hasattr(mask, "mask_mod"):  # a BlockMask
        return ": make one by Mask.from_mask_mod(mask.mask_mod, n)"
    if callable(mask):
        return ": make one by Mask.from_mask_mod(mask, n)"
    if not isinstance(mask, Tensor | np.ndarray):
        return ""
    shape = tuple(mask.shape)
    if len(shape) < 2 or any(size > 1 for size in shape[:-2]):
        return ": batch rows with masks of their own are Mask.batch([Mask.from_dense(rows), ...])"
    table = "mask" + (len(shape) > 2) * f"[{', '.join('0' * (len(shape) - 2))}]"
    added = "float" in str(mask.dtype)  # to the scores, as for scaled_dot_product_attention
    return f": make one by Mask.from_dense({table}{' == 0' * added})"


def length_of(tokens: int, cp: int, layout: str | None = "zigzag") -> int:
    """Return the length of the whole sequence if each of `cp` ranks holds `tokens` of its tokens.

    Raises `ConfigError` if a zigzag layout would give ranks different numbers of tokens.
    """
    chunks = LAYOUTS[layout].chunks if layout in LAYOUTS else 1
    if cp > 1 and tokens % chunks:
        raise ConfigError(
            f"a rank holds {tokens} tokens, not a multiple of {chunks}, so the length of the "
            f"sequence is unknown: pad it to a multiple of {chunks * cp}, or pass a Layout as "
            "layout="
        )
    return tokens * cp


@RUNTIME.cache(maxsize=64)
def _mask(edges: tuple[int, ...], causal: bool, window: tuple[int, int]) -> Mask:
    if len(edges) > 2:
        return Mask.documents(edges, causal, window)
    return (Mask.causal if causal else Mask.full)(edges[-1], window)
