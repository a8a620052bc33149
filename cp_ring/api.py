"""`ring_attention`, the function for users: from its keywords to a plan and an `Attention`, which
are kept for later calls.
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
from cp_ring.comm.latent import LatentKeys
from cp_ring.comm.transport import Group, check_local, transport_of_call
from cp_ring.cuts import check_cut, check_slices
from cp_ring.errors import ConfigError, PlanError
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.observe import watchdog
from cp_ring.options import LEFT, LEFT_VALUES
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan_cache import PlanOptions


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
    """Exact attention over a sequence that is sharded across the ranks of `group`; differentiable.

    Every rank of `group` makes the same call with its own shard of the sequence (`cp_ring.shard`
    cuts it). It is the counterpart of flash-attn's
    `flash_attn_func(q, k, v, causal=..., window_size=...)` and of torch's
    `scaled_dot_product_attention` for a sequence that one device does not hold.

    Args:
        q: queries [b, s, h, d] of this rank; s is the number of its tokens. float16, bfloat16,
        float32 or float64.
        k: keys [b, s, g, d], where g divides h (grouped-query attention). Only the g heads travel.
            Or `LatentKeys`, the latents of multi-latent attention, from which keys and values are
            made.
        v: values [b, s, g, e]; e may differ from d. None with `LatentKeys`.
        group: the context-parallel ranks: a ProcessGroup, a one-dimensional DeviceMesh, a transport
            (such as a rank of `cp_ring.testing.local_ring.LocalRing`), or None for a single rank.
            In a job of several ranks None is an error; `cp_ring.ALONE` is this rank by itself.
        causal: each query sees only keys at its own position and before it.
        window_size: (left, right) as in flash-attn: query i sees keys i - left to i + right; -1
        leaves a side open.
        cu_seqlens: where packed documents begin and end in the whole sequence, [0, ..., n], as in
            flash-attn's varlen functions. Documents do not see one another. The offsets are those
            of the whole sequence, the same on every rank.
        mask: any other mask, as a `Mask`: `Mask.prefix`, `Mask.documents`, `Mask.batch`, ... It
            replaces `causal`, `window_size` and `cu_seqlens`. `Mask.from_dense` takes an array of
            booleans, `Mask.from_mask_mod` a `mask_mod` function of FlexAttention.
        plan: a plan made with `Plan.build`, or this rank's part of it. It replaces mask, layout,
            route, schedule and heads. Without one, a plan is made for the given mask and layout,
            proven, and kept for later calls with the same arguments.
        layout: which rank holds which tokens: `zigzag` (the default, and that of `cp_ring.shard`),
            another name in `cp_ring.plan.layout.LAYOUTS`, or a `Layout`. Without `mask`,
            `cu_seqlens` or a `Layout`, all ranks must hold equally many tokens.
        route: how keys reach the ranks that need them: `direct`, from their owner at the hop that
            reads them, or `ring`, from neighbor to neighbor.
        schedule: at which hop a rank uses the keys of which others: `auto`, 2 sources
            first and 4 a hop then, or all in one hop where few keys are remote; `ring`, one source
            a hop; `gather`, all remote sources in one hop; or the hop of each ring distance, as
            (0, 1, 2, 2) for 4 ranks.
        heads: how many neighboring ranks of `group` exchange tokens for heads by an all-to-all.
            Each then computes its part of the query heads for the tokens of all of them, and the
            ring has as many times fewer members. It must divide the ranks and the query heads, and
            the key/value heads too, or be a multiple of these. The number of all ranks is
            DeepSpeed-Ulysses, 1 the ring alone. `auto`, the default, is 1 inside one node; in a
            group of several nodes it is 1 or a divisor of the ranks of a node, for each mask that
            of least predicted time.
        softmax_scale: factor of the scores; d ** -0.5 by default.
        sink: [h], a learned softmax offset: exp(sink) is added to the softmax denominator of each
            query. Zeros give the off-by-one softmax. Its gradient is this rank's share; sum it over
            `group`, as for any replicated parameter.
        return_lse: also return the log-sum-exp of the scores, through which gradients flow too:
            backward then calls the kernel twice. With it, attentions to different keys can be
            merged.
        deterministic: True asks for the same bits in every run, False does not; None follows
            `torch.use_deterministic_algorithms`.
        kernel: `auto`, or a name in `cp_ring.kernels.REGISTRY`.
        num_slots: receive buffers for keys and values, 2 to 8. Memory grows with it, not with the
        number of ranks.
        wire: how keys and values travel: `plain`, as they are; `int8` or `fp8`, quantized by token
            and head, so a quarter of the bytes of float32 and half of those of bfloat16, at the
            cost of accuracy; `latent`, as latents, which the reader multiplies by the
            up-projection. A rank's own keys stay exact. None is `latent` for `LatentKeys`, else
            `plain`. The gradient of the up-projection is this rank's share; sum it over `group`, as
            for any replicated parameter.
        wire_dtype: the dtype in which partial gradients of keys and values travel: `input`,
        `float32` or `bfloat16`.
        qkv_format: `bshd`; `sbhd` for tensors [s, b, heads, head size]; `bhsd` for [b, heads, s,
            head size]; `thd` for [s, heads, head size], with lse [h, s]. `out` has the same format.
        timeout: seconds that this process may wait for other ranks. A thread watches the waits from
            then on, in backward and in other collectives too. A rank that waits for longer prints
            where it is and names the rank that is stuck or does not call; all ranks that wait end,
            with exit code 3. None starts no such thread. It needs a process group.

    Returns:
        out [b, s, h, e] in the dtype of q; with `return_lse` also lse [b, h, s] in float32 (float64
        for float64 inputs). Queries that see no key have out 0 and lse -inf. Sums are accumulated
        in float32 (float64 for float64 inputs). Backward computes the softmax weights again from
        lse in float32, so scores of size x put a relative error of up to 6e-8 * x into the
        gradients, on any number of ranks: 2e-3 for scores of 3e4. float64 inputs avoid it.

    Under `torch.autocast` the call computes in the dtype of q, k and v, forward and backward, and
    out has this dtype. Where their dtypes differ, they are cast to that of autocast first; float64
    is never cast.

    `torch.compile` leaves the call as it is: a graph break.

    Where batch rows have different masks, give `Mask.batch(...)` with `Layout.batch(...)`, or a
    plan for them.

    Raises:
        ConfigError: arguments that contradict each other, or a group that cannot be used.
        PlanError: tensors, group and plan that disagree; on all ranks, where ranks of the group
            make different calls. They are compared when a call is new to the group
            (`cp_ring.comm.agreement`).
        KernelError: the kernel is unknown, not installed, or cannot compute such tensors.
        All three are ValueErrors whose one line names the argument.

    Ring attention: Liu et al., https://arxiv.org/abs/2310.01889.
    """
    if options.get("qkv_format") in _DIMENSIONS:
        return _in_format(str(options["qkv_format"]), (q, k, v), group, return_lse, options)
    if torch.compiler.is_compiling():
        return _out_of_graph(q, k, v, group, return_lse=return_lse, **options)
    attention, inputs = _resolved(q, k, v, group, return_lse, options)
    out, lse, *_ = attention(inputs)
    if not return_lse:
        return out
    assert lse is not None, "an lse that was asked for is missing"
    return out, lse


_DIMENSIONS = {"bhsd": 4, "thd": 3}
"""Formats whose tensors are views of those of the format bshd, and their numbers of dimensions."""


def _in_format(
    name: str, tensors: tuple[Any, ...], group: Group, return_lse: bool, options: Any
) -> Any:
    """`ring_attention` for tensors of such a format."""
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
    """What `ring_attention` calls, and with what."""
    of_call: dict[str, Any] = dict(options)
    of_plan = {name: of_call.pop(name) for name in options if name in _OF_PLAN}
    if of_plan.get("layout", "") is None:  # the default, as for `shard`
        del of_plan["layout"]
    for name in sorted(of_call.keys() - _OF_CALL):
        if name in LEFT:
            raise ConfigError(f"{name} left cp_ring: {LEFT[name]}")
        near = difflib.get_close_matches(name, _OF_CALL | _OF_PLAN, 1, 0.4)
        raise TypeError(
            f"ring_attention() got an unexpected keyword argument {name!r}"
            + f"; did you mean {''.join(near)}?" * bool(near)
        )
    for name in LEFT_VALUES.keys() & options.keys():
        value: Any = options.get(name)
        if isinstance(value, str) and value in LEFT_VALUES[name]:
            raise ConfigError(f"{name}={value!r} left cp_ring: {LEFT_VALUES[name][value]}")
    if (timeout := of_call.pop("timeout", None)) is not None:
        _watch(timeout)
    latents, sink = None, of_call.pop("sink", None)
    if isinstance(k, LatentKeys):
        latents, (k, v) = k.latents(), k.expand()
    elif v is None:
        raise PlanError("v is missing: only LatentKeys in place of k need none")
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
                check_cut(transport, plan.layout, "ring_attention", "layout" in of_plan)
                check_slices((q, k, v), int(not tokens_first), plan.layout, transport.rank)
    inputs = Inputs(q, k, v, sink, latents).alike()
    plain = latents is None or plan.ulysses > 1
    of_call["wire"] = of_call.get("wire") or ("plain" if plain else "latent")
    return attention_of(plan, group, AttentionOptions(**of_call, lse=return_lse), inputs), inputs


def _watch(timeout: float) -> None:
    """Starts the thread that watches waits of up to `timeout` seconds. Raises `ConfigError` if that
    is no length of time.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
        raise ConfigError(f"timeout={timeout!r}: it must be a number of seconds above 0, or None")
    watchdog.start(timeout)
    watchdog.enter("ring_attention", watchdog.WATCH.place.step)
