"""Scores by position: the dropout, the ALiBi slopes and the bias of a call of `ring_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.kernels.dropout import Bias, Dropout, mixed
from cp_ring.ops.dtypes import finite
from cp_ring.plan.plan import Plan
from cp_ring.plan.tables import RankPlan


def of_positions(
    plan: Plan | RankPlan, rank: int, q: Tensor, options: dict[str, Any]
) -> Dropout | None:
    """Takes `dropout_p`, `dropout_seed`, `alibi_slopes` and `bias` out of the keywords of a call of
    this rank, whose plan knows all tokens' positions; None without them.
    """
    p, seed = options.pop("dropout_p", 0.0), options.pop("dropout_seed", None)
    slopes, bias = options.pop("alibi_slopes", None), options.pop("bias", None)
    if not 0 <= expect("dropout_p", p, Real) < 1:
        raise ConfigError(f"dropout_p={p}: it must be from 0 to below 1")
    if not p and slopes is None and bias is None:
        return None
    if p and (not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64):
        raise ConfigError(
            f"dropout_seed={seed!r}: dropout needs a whole number of up to 64 bits, the same on "
            "all ranks and another in each call"
        )
    if isinstance(plan, RankPlan):
        name = f"dropout_p={p}" if p else "alibi_slopes" if slopes is not None else "bias"
        raise ConfigError(
            f"{name}: give the plan of all ranks, which has the positions of tokens, not that of "
            "one rank"
        )
    batch, of_keys = plan.layout.rows, None
    mine = plan.layout.positions(rank)
    if plan.key_layout is plan.layout:
        mine %= plan.n // batch
    else:
        held = plan.mask.key_positions[plan.key_layout.positions(rank)]
        of_keys, mine = _of_batch(held, batch), plan.mask.positions[mine]
    key, position = mixed(seed) if seed is not None else 0, _of_batch(mine, batch)
    added = None
    if bias is not None:
        if plan.ulysses > 1 or batch > 1 or of_keys is not None:
            raise ConfigError(
                "bias: heads are not exchanged, batch rows have one mask, and keys are those of "
                "the queries' tokens"
            )
        tokens_first = options.get("qkv_format") == "sbhd"
        sizes = (*(q.shape[1::-1] if tokens_first else q.shape[:2]), q.shape[2])
        added = Bias(_checked(bias, sizes, plan.n), position.to(q.device))
    return Dropout(p, key, position, 0, _slopes(slopes, q), of_keys, added)


def _checked(bias: Any, sizes: tuple[int, ...], n: int) -> Tensor:
    """The bias of b batch rows, s queries of this rank and h heads."""
    b, s, h = sizes
    shape = list(bias.shape)
    fits = bias.dim() == 4 and all(
        has in (1, size) for has, size in zip(shape, (b, h, s), strict=False)
    )
    if not fits or shape[3] != n or not bias.is_floating_point():
        raise PlanError(
            f"bias is {shape} of {bias.dtype}: it must be numbers of [{b} or 1, {h} or 1, {s} or "
            f"1, {n}], batch rows, heads, queries of this rank and all keys"
        )
    return bias


def _of_batch(positions: np.ndarray, batch: int) -> Tensor:
    """[s], or [s, batch]."""
    tensor = torch.from_numpy(positions)
    return tensor.view(batch, -1).T if batch > 1 else tensor


def _slopes(slopes: Tensor | Sequence[float] | None, q: Tensor) -> tuple[float, ...]:
    if slopes is None:
        return ()
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        raise ConfigError("alibi_slopes are constants: detach them, there is no gradient of them")
    numbers = finite(slopes, "alibi_slopes")
    if numbers.shape != q.shape[2:3]:
        raise PlanError(
            f"alibi_slopes must hold one finite number for each of {q.shape[2]} query heads"
        )
    return tuple(numbers.tolist())
