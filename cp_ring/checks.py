"""What the arguments of an attention call must be: each check raises an error whose one line names the argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_ring.comm.codecs import CODECS
from cp_ring.comm.transport import Transport
from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.sizes import AttentionSizes
from cp_ring.plan.tables import RankPlan

AnyPlan = Plan | RankPlan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rank_plan_of(plan: AnyPlan, transport: Transport | None) -> RankPlan:
    """The part of a plan that this rank of the transport runs. Raises `PlanError` where the two do not fit together."""
    if not isinstance(plan, AnyPlan):
        hint = "mask=" if isinstance(plan, Mask) else "layout=" if isinstance(plan, Layout) else "plan=Plan.build(mask, layout)"
        raise PlanError(f"plan is a {type(plan).__name__}, not a Plan: pass {hint}")
    if transport is None and plan.cp > 1:
        raise PlanError(f"the plan is for {plan.cp} ranks: pass their process group as group=")
    if transport is not None and transport.size != plan.cp:
        raise PlanError(f"the plan is for {plan.cp} ranks, the group has {transport.size}")
    rank = transport.rank if transport else 0
    rank_plan = plan if isinstance(plan, RankPlan) else plan.rank_plan(rank)
    if rank_plan.rank != rank:
        raise PlanError(f"plan is the part of rank {rank_plan.rank}, but this is rank {rank} of the group")
    return rank_plan


def check_values(num_slots: int, wire: str, wire_dtype: str, qkv_format: str, softmax_scale: float | None) -> None:
    """Raises `ConfigError` for a value that no call can have."""
    if not isinstance(num_slots, int) or not 2 <= num_slots <= 8:
        raise ConfigError(f"num_slots={num_slots!r}: it must be a whole number from 2 to 8")
    if wire not in CODECS:
        raise ConfigError(f"wire={wire!r}: known are {', '.join(CODECS)}")
    if wire_dtype not in ("input", "float32", "bfloat16"):
        raise ConfigError(f"wire_dtype={wire_dtype!r}: it must be 'input', 'float32' or 'bfloat16'")
    if qkv_format not in ("bshd", "sbhd"):
        raise ConfigError(f"qkv_format={qkv_format!r}: it must be 'bshd' or 'sbhd'")
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ConfigError(f"softmax_scale={softmax_scale}: it must be a finite number above 0")


def check_local(name: str, x: Tensor) -> None:
    """Raises `ConfigError` for a DTensor: its local part may be split in another way than the layout says."""
    if hasattr(x, "to_local"):
        raise ConfigError(f"{name} is a {type(x).__name__}: pass the part of this rank that the layout says, as a plain tensor")


def tokens_and_batch(q: Tensor, qkv_format: str) -> tuple[int, int]:
    """Tokens of each batch row, and batch rows. Raises `PlanError` where q has not 4 dimensions, `ConfigError` for a DTensor."""
    check_local("q", q)
    if q.dim() != 4:
        raise PlanError(f"q must have 4 dimensions, batch, tokens, heads and head size, not the shape {tuple(q.shape)}")
    return (q.shape[0], q.shape[1]) if qkv_format == "sbhd" else (q.shape[1], q.shape[0])


def sizes_of(q: Tensor, k: Tensor, v: Tensor, batch: int) -> AttentionSizes | None:
    """Sizes for predicted times; None for tensors that `check_tensors` is about to reject."""
    if k.dim() != 4 or v.dim() != 4 or 0 in (*q.shape, *k.shape, *v.shape) or q.shape[2] % k.shape[2]:
        return None
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(q.dtype, "fp32")
    return AttentionSizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype=dtype, batch=batch)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    """Raises `PlanError` for tensors that do not fit together, in any `qkv_format`; `ConfigError` for a DTensor."""
    for name, x in (("q", q), ("k", k), ("v", v), *((("sink", sink),) if sink is not None else ())):
        check_local(name, x)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise PlanError(f"q, k and v must have 4 dimensions, batch, tokens, heads and head size; here {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise PlanError(f"q, k and v must share one floating-point dtype of 16 to 64 bits; here {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise PlanError(f"q, k and v must be on one device; here {q.device}, {k.device}, {v.device}")
    if 0 in (*q.shape[2:], *k.shape[2:], v.shape[3]):
        raise PlanError(f"q, k and v need at least one head, of size at least 1; here {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise PlanError(
            f"batch sizes and tokens must agree, q and k must share a head size, key/value heads must divide query heads; "
            f"here {shapes}"
        )
    if sink is not None and (sink.shape != q.shape[2:3] or not sink.is_floating_point() or sink.device != q.device):
        raise PlanError(
            f"sink must hold one number for each of {q.shape[2]} query heads on {q.device}, not {tuple(sink.shape)} of "
            f"{sink.dtype} on {sink.device}"
        )


def check_tokens(q: Tensor, k: Tensor, v: Tensor, rank_plan: RankPlan) -> None:
    """Raises `PlanError` where q, k, v [s, b, heads, head size] have other tokens than the rank plan."""
    if any(x.shape[0] != rank_plan.shard_tokens for x in (q, k, v)):
        held, batch = rank_plan.shard_tokens, rank_plan.batch
        batches = f" ({batch} batch rows of {held // batch})" if batch > 1 else ""
        raise PlanError(f"rank {rank_plan.rank} holds {held} tokens of the layout{batches}, but q, k and v have {q.shape[0]}")
