"""The masks that batches declare.

A batch may carry `cp_ring_mask` beside its tokens: a `Mask` for all of its batch rows, or a list
with one for each. The mask travels as documents do, see `documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import Split
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask, narrowed
from cp_ring.megatron.options import MASK_KINDS
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask


class DeclaredMask(MicrobatchMask):
    """The mask that a batch declares. A causal layer's window limits earlier keys only."""

    origin = KEY
    later = -1

    @classmethod
    def of_rows(cls, masks: Sequence[Mask], cp: int, split: Split = Split()) -> DeclaredMask:
        """Join the masks of batch rows, which have the same length. `split` splits each batch row
        separately.
        """
        layouts = [split.layout_of(mask.n, cp, partial(_narrowed_before, mask)) for mask in masks]
        if len(masks) == 1:
            return cls(masks[0], layouts[0])
        return cls(Mask.batch(masks), Layout.batch(layouts), len(masks))

    def with_positions(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors [b, n] with the mask's position ids, if a token's position in some
        batch row differs from its index. Position ids with sections do not change.
        """
        ids = whole.get("position_ids")
        positions = self.whole.positions
        stock = np.array_equal(positions, np.arange(self.layout.n) % self.row)
        if ids is None or ids.dim() == 3 or stock:
            return whole
        return whole | {"position_ids": torch.from_numpy(positions).view(ids.shape).to(ids)}


def _narrowed_before(mask: Mask, window: tuple[int, int]) -> Mask:
    return narrowed(mask, (window[0], -1))


def read(entry: Any, batch: int, n: int, kinds: Sequence[str]) -> list[Mask]:
    """Return the masks of `batch` batch rows of `n` tokens from the entry `KEY` of a batch; None
    means causal.

    Raises `ConfigError` for an entry that is not a mask of `n` tokens, or whose kind is not among
    `kinds`, which the job declares.
    """
    if entry is None:
        return [Mask.causal(n)] * batch
    several = entry if isinstance(entry, list | tuple) else [entry] * batch
    if len(several) != batch:
        raise ConfigError(
            f"{KEY} holds {len(several)} masks for {batch} batch rows: give one for each, or one "
            "for all"
        )
    for mask in several:
        if not isinstance(mask, Mask):
            kind = type(mask).__name__
            raise ConfigError(f"{KEY} is a {kind}, not a Mask, or a list of them")
        if mask.n != n:
            raise ConfigError(f"{KEY} is for {mask.n} tokens, but a batch row has {n}")
        name = mask.name.replace("_", "-")
        if name not in kinds and "any" not in kinds:
            raise ConfigError(
                f"{KEY} is a mask of the kind {name}, which the certificate has not probed: add "
                f"{name if name in MASK_KINDS else 'any'} to --cp-ring-mask-kinds {','.join(kinds)}"
            )
        if int(mask.positions.max()) >= n:
            raise ConfigError(
                f"{KEY} has positions up to {mask.positions.max()}, past the {n} tokens of a batch "
                "row"
            )
    return [*several]
