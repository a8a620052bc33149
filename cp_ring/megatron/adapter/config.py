"""The configuration of ring attention in a model's layers, and how it splits their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cp_ring.errors import ConfigError
from cp_ring.options import CallSettings, either
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.runtime import RUNTIME

LayerWindows = tuple[tuple[tuple[int, int], int], ...]
"""The windows (left, right) of a model's attention layers (-1 for any number of keys), each with
the number of layers that have it.
"""
EVERY_KEY: LayerWindows = (((-1, -1), 1),)


class Split(NamedTuple):
    """How tokens are split over ranks: the name of a layout, and the windows of all layers, whose
    work a layout may balance together.
    """

    layout: str = "zigzag"
    windows: LayerWindows = EVERY_KEY

    def equals(self, other: Split) -> bool:
        """Return True if both split any tokens alike."""
        return self == other or (self.layout == other.layout and not LAYOUTS[self.layout].weighs)

    def layout_of(
        self, n: int, cp: int, mask_of: Callable[[tuple[int, int]], Mask] | None = None
    ) -> Layout:
        """Return the layout of a stream of `n` tokens over `cp` ranks.

        A layout that weighs masks, as `balanced` does, balances those of all layers together:
        `mask_of` gives the mask for each window; by default it is causal.
        """
        named = LAYOUTS[self.layout]
        if mask_of is None or not named.weighs:
            return _of_rows(self, n, cp)
        return named.of_layers([(mask_of(window), count) for window, count in self.windows], cp)


@RUNTIME.cache(maxsize=16)
def _of_rows(split: Split, n: int, cp: int) -> Layout:
    layers = [(Mask.causal(n, window), count) for window, count in split.windows]
    return LAYOUTS[split.layout].of_layers(layers, cp)


@dataclass(frozen=True)
class RingConfig(CallSettings):
    """How ring attention runs in the layers of a model; immutable.

        ModuleSpec(module=RingDotProductAttention, params={"ring": RingConfig(schedule="ring")})

    The settings of calls (kernel, layout, route, schedule, heads, wire, ...) are those of
    `CallSettings`. Only the layout zigzag fits the rotary embeddings of Megatron without patches.

    Attributes:
        compare_every: compare one new plan in this many among the ranks; 0 never does.
        hop_timeout: seconds that a rank waits for a hop before the process ends; 0 waits forever.
        debug: fill receive buffers with NaN and compare the ranks at every call.
        windows: the windows of all layers, which a balanced layout balances together.
        row: tokens of a whole batch row, to find batches that are not split; 0 if unknown.
        whole_rows: packed documents (thd) are split together as one sequence, not one by one.
            Megatron's batches do not say which of the two ways they were split.
        document_mask: every microbatch in sbhd carries its documents.
        declared_masks: every microbatch carries the mask that its batch declares.
        recurrent: what the ranks of recurrent layers exchange: heads or states, or the letter of
            the layers that exchange states (see `recurrent.build`).
    """

    compare_every: int = 16
    hop_timeout: float = 600
    debug: bool = False
    windows: LayerWindows = EVERY_KEY
    row: int = 0
    whole_rows: bool = False
    document_mask: bool = False
    declared_masks: bool = False
    recurrent: str = "heads"

    def __post_init__(self) -> None:
        given = f"RingConfig(layout={self.layout!r}, hop_timeout={self.hop_timeout!r})"
        if self.layout not in LAYOUTS:
            raise ConfigError(f"{given}: layout must be {either([*LAYOUTS])}")
        if not isinstance(self.hop_timeout, int | float) or self.hop_timeout < 0:
            raise ConfigError(f"{given}: hop_timeout must be a number of seconds, or 0")

    @property
    def split(self) -> Split:
        return Split(self.layout, self.windows)

    @property
    def split_of_packed(self) -> Split | None:
        """Return the split of packed documents (thd), or None if each is split separately."""
        return self.split if self.whole_rows else None

    @property
    def by_microbatch(self) -> bool:
        """Return True if a rank's tokens or their positions may differ between microbatches."""
        weighs = LAYOUTS[self.layout].weighs
        return self.declared_masks or (self.document_mask and weighs)

    @property
    def expected(self) -> str:
        """Return the flag with which every microbatch has documents or a mask, or ""."""
        if self.document_mask:
            return "--cp-ring-document-mask"
        if self.whole_rows:
            return "--dataloader-inter-document-masking or --sft"
        return "--cp-ring-mask-kinds" if self.declared_masks else ""


_in_force = RUNTIME.cell(RingConfig())


def in_force() -> RingConfig:
    """Return the configuration of layers that are built without one, and of functions that Megatron
    calls outside of a layer.
    """
    return _in_force.value


def use(ring: RingConfig) -> None:
    """Put `ring` in force for layers and batches made from now on."""
    _in_force.value = ring
