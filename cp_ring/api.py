"""`ring_attention`, the function for users: it turns its keywords into a plan and an `Attention`,
and keeps both for later calls.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from cp_ring.attention import AnyPlan, Attention, attention_of
from cp_ring.comm.agreement import LIMIT
from cp_ring.comm.groups import Group, check_local, transport_of_call
from cp_ring.comm.latent import LatentKeys
from cp_ring.cuts import check_cut
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.observe import watchdog
from cp_ring.options import UNSUPPORTED
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan_cache import PlanOptions
from cp_ring.runtime import RUNTIME


class CallOptions(TypedDict, total=False):
    """The keywords of `ring_attention`, but for `return_lse`. Their defaults are in `PlanOptions`
    and `AttentionOptions`.
    """

    causal: bool
    window_size: tuple[int, int]
    cu_seqlens: Sequence[int] | np.ndarray | Tensor | None
    mask: Mask | None
    plan: AnyPlan | None
    layout: str | Layout
    route: str
    schedule: str | Sequence[int]
    heads: int | str
    softmax_scale: float | None
    deterministic: bool | None
    kernel: str
    num_slots: int
    wire: str | None
    wire_dtype: str
    qkv_format: str
    sink: Tensor | None
    timeout: float | None


_OF_PLAN = frozenset(field.name for field in fields(PlanOptions))
_OF_CALL = frozenset(CallOptions.__annotations__) - _OF_PLAN


# fmt: off
@overload
def ring_attention(
    q: Tensor, k: Tensor | LatentKeys, v: Tensor | None = None, group: Group = None, *,
    return_lse: Literal[False] = False, **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor | LatentKeys, v: Tensor | None = None, group: Group = None, *,
    return_lse: Literal[True], **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
# fmt: on
def ring_attention(
    q: Tensor,
    k: Tensor | LatentKeys,
    v: Tensor | None = None,
    group: Group = None,
    *,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact, differentiable attention over a sequence that is sharded across the ranks of `group`.

        out = cp_ring.ring_attention(q, k, v, group, causal=True)

    Every rank of `group` makes the same call with its own shard, which `cp_ring.shard` cuts.

    Args:
        q: queries [b, s, h, d] of this rank's s tokens: float16, bfloat16, float32 or float64.
        k: keys [b, s, g, d], where g divides h; or `LatentKeys` for multi-latent attention.
        v: values [b, s, g, e]; e may differ from d. None with `LatentKeys`.
        group: a ProcessGroup, a one-dimensional DeviceMesh, a transport such as a rank of
            `cp_ring.testing.local_ring.LocalRing`, `cp_ring.ALONE` for this rank by itself, or None
            in a job of one rank.
        causal: True lets each query see only the keys up to its own position.
        window_size: (left, right): query i sees keys i - left to i + right; -1 leaves a side open.
        cu_seqlens: offsets [0, ..., n] of packed documents in the whole sequence, the same on every
            rank. A query sees only its own document.
        mask: any other `Mask`, in place of `causal`, `window_size` and `cu_seqlens`.
        plan: a plan from `Plan.build`, or this rank's part of it, in place of mask, layout, route,
            schedule and heads. By default a plan is made, proven and kept.
        layout: which rank holds which tokens: `zigzag` (the default), another name in
            `cp_ring.plan.layout.LAYOUTS`, or a `Layout`.
        route: `direct` sends keys straight from their owner, `ring` from neighbor to neighbor.
        schedule: how many remote sources a hop reads: `auto` (2 at first, then 4), `ring` (one),
            `gather` (all), or the hop of each ring distance, as (0, 1, 2, 2) for 4 ranks.
        heads: how many neighboring ranks exchange tokens for heads by an all-to-all: 1 is the ring
            alone, the number of all ranks is DeepSpeed-Ulysses. It divides the ranks and the query
            heads, and divides the key/value heads or is a multiple of them. `auto` (the default) is
            1 in one node; across nodes, 1, a divisor of the ranks of a node, or the ranks of small
            nodes, by predicted time.
        softmax_scale: the factor of the scores; by default d ** -0.5.
        sink: [h], a learned softmax offset: exp(sink) is added to each softmax denominator. Sum its
            gradient over `group`.
        return_lse: True also returns the differentiable log-sum-exp of the scores.
        deterministic: True asks for the same bits in every run; None follows
            `torch.use_deterministic_algorithms`.
        kernel: `auto`, or a name in `cp_ring.kernels.REGISTRY`.
        num_slots: receive buffers for keys and values, 2 to 8; memory grows with it.
        wire: how keys and values travel: `plain`; `int8` or `fp8`, quantized by token and head at
            some cost of accuracy; `latent`, the default with `LatentKeys`, whose up-projection's
            gradient must be summed over `group`.
        wire_dtype: the dtype in which partial gradients of keys and values travel: `input`,
            `float32` or `bfloat16`.
        qkv_format: the dimensions of q, k, v and out: `bshd`, `sbhd`, `bhsd` or `thd` (lse is then
            [h, s]).
        timeout: seconds to wait for other ranks, from then on. A rank that waits
            longer names the missing rank: a first call of a kind raises `PlanError`, others end
            all waiting ranks with exit code 3.

    Returns:
        out [b, s, h, e] in the dtype of q; with `return_lse` also lse [b, h, s]. Sums and lse are
        float32, or float64 for float64 inputs. A query that sees no key has out 0 and lse -inf.
        Backward computes the softmax weights again from lse: scores of size x put a relative error
        of up to 6e-8 * x into float32 gradients, on any number of ranks.

    Under `torch.autocast`, inputs of different dtypes are cast to its dtype (float64 never is);
    inputs of one dtype keep theirs. `torch.compile` breaks the graph here. Batch rows with
    different masks take `Mask.batch(...)` with `Layout.batch(...)`.

    Raises:
        ConfigError: arguments contradict each other, or the group cannot be used.
        PlanError: tensors, group and plan disagree; or ranks make different calls, on all ranks if
            both calls are new.
        KernelError: the kernel is unknown, not installed, or does not support these tensors.
        All three are ValueErrors, and their one line names the argument.

    Source: ring attention, Liu et al., https://arxiv.org/abs/2310.01889.
    """
    layout_of_tensors = expect("qkv_format", options.get("qkv_format", ""), str)
    if layout_of_tensors in _DIMENSIONS:
        return _in_format(layout_of_tensors, (q, k, v), group, return_lse, options)
    if torch.compiler.is_compiling():
        return _out_of_graph(q, k, v, group, return_lse=return_lse, **options)
    attention, inputs = _resolved(q, k, v, group, return_lse, options)
    out, lse, *_ = attention(inputs)
    if not return_lse:
        return out
    assert lse is not None, "an lse that was asked for is missing"
    return out, lse


_DIMENSIONS = {"bhsd": 4, "thd": 3}
"""Formats whose tensors are views of the format bshd, and how many dimensions they have."""


def _in_format(
    name: str, tensors: tuple[Any, ...], group: Group, return_lse: bool, options: Any
) -> Any:
    """Run `ring_attention` on tensors of a format in `_DIMENSIONS`."""
    for of, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor) or x.dim() != _DIMENSIONS[name]:
            shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise PlanError(
                f"qkv_format={name!r}: {of} must be a tensor of {_DIMENSIONS[name]} dimensions, "
                f"not {shape}"
            )
    packed = name == "thd"
    views: list[Any] = [x[None] if packed else x.transpose(1, 2) for x in tensors]
    call: Any = ring_attention
    results = call(*views, group, **{**options, "return_lse": return_lse, "qkv_format": "bshd"})
    out, *lse = results if return_lse else (results,)
    out = out[0] if packed else out.transpose(1, 2)
    return (out, lse[0][0] if packed else lse[0]) if return_lse else out


# `torch.compiler.disable` that does not import the compiler: the call is a graph break
@_disable_dynamo
def _out_of_graph(*args: Any, **options: Any) -> Any:
    return ring_attention(*args, **options)


def _resolved(
    q: Tensor,
    k: Tensor | LatentKeys,
    v: Tensor | None,
    group: Group,
    return_lse: bool,
    options: CallOptions,
) -> tuple[Attention, Inputs]:
    """Return the `Attention` that the call runs, and its inputs."""
    of_call: dict[str, Any] = dict(options)
    of_plan = {name: of_call.pop(name) for name in options if name in _OF_PLAN}
    if of_plan.get("layout", "") is None:  # the default, as for `shard`
        del of_plan["layout"]
    for name in of_call.keys() - _OF_CALL:
        raise _unknown(name)
    if (timeout := of_call.pop("timeout", None)) is not None:
        _watch(timeout)
    latents, sink = None, of_call.pop("sink", None)
    if isinstance(k, LatentKeys):
        if v is not None:
            raise PlanError("v is given beside LatentKeys, which have the values too: leave it out")
        latents, (k, v) = k.latents(), k.expand()
    elif v is None:
        raise PlanError("v is missing: leave it out only with LatentKeys in place of k")
    for name, x in {"q": q, "k": k, "v": v, "sink": sink}.items():
        if x is not None or name != "sink":
            check_local(name, x)
    plan = of_plan.get("plan")
    split = plan or of_plan.get("layout")
    transport = transport_of_call(group, q.device, split)
    if plan is None or len(of_plan) > 1:
        asked = PlanOptions(**of_plan)
        if plan is None:
            tokens_first = of_call.get("qkv_format") == "sbhd"
            plan = asked.find(transport, (q, k, v), tokens_first, latents is not None)
            if transport is not None and isinstance(asked.layout, str):
                check_cut(transport, plan.layout, "ring_attention")
    inputs = Inputs(q, k, v, sink, latents).alike()
    plain = latents is None or plan.ulysses > 1
    of_call["wire"] = of_call.get("wire") or ("plain" if plain else "latent")
    return attention_of(plan, transport, _made_once(of_call, return_lse), inputs), inputs


def _unknown(name: str) -> Exception:
    """Return the error of a keyword that there is not."""
    if name in UNSUPPORTED:
        return ConfigError(f"{name} is not supported: {UNSUPPORTED[name]}")
    near = difflib.get_close_matches(name, _OF_CALL | _OF_PLAN, 1, 0.4)
    return TypeError(
        f"ring_attention() got an unexpected keyword argument {name!r}"
        + f"; did you mean {''.join(near)}?" * bool(near)
    )


_options = RUNTIME.cache(maxsize=64, typed=True)(AttentionOptions)


def _made_once(values: dict[str, Any], lse: bool) -> AttentionOptions:
    try:
        return _options(**values, lse=lse)
    except TypeError:  # a list or the like, which no option can be, and no cache can hold
        return AttentionOptions(**values, lse=lse)


def _watch(timeout: float) -> None:
    """Start the thread that watches waits of up to `timeout` seconds. Raises `ConfigError` if that
    is no length of time.
    """
    number = isinstance(timeout, int | float) and timeout is not True
    if not number or not 0 < timeout <= sys.float_info.max:
        raise ConfigError(f"timeout={timeout!r}: it must be a number of seconds above 0, or None")
    LIMIT.value = timeout
    watchdog.start(timeout)
    watchdog.enter("ring_attention", watchdog.WATCH.place.step)
