"""`ring_attention`, the function for users: it turns its keywords into a plan and an `Attention`,
and keeps both for later calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from operator import is_
from typing import Any

from torch import Tensor

from cp_ring.attention import AnyPlan, attention_of
from cp_ring.comm.agreement import LIMIT
from cp_ring.comm.groups import Group, check_local, transport_of_call
from cp_ring.comm.latent import LatentKeys
from cp_ring.cuts import check_cut
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.observe import watchdog
from cp_ring.ops.graphs import out_of_graphs
from cp_ring.options import CallSettings
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan_cache import Offsets, PlanOptions
from cp_ring.runtime import RUNTIME


@out_of_graphs
def ring_attention(
    q: Tensor,
    k: Tensor | LatentKeys,
    v: Tensor | None = None,
    group: Group = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = PlanOptions.window_size,
    cu_seqlens: Offsets | None = None,
    mask: Mask | None = None,
    plan: AnyPlan | None = None,
    layout: str | Layout | None = CallSettings.layout,
    route: str = CallSettings.route,
    schedule: str | Sequence[int] = CallSettings.schedule,
    heads: int | str = CallSettings.heads,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    kernel: str = CallSettings.kernel,
    num_slots: int = CallSettings.num_slots,
    wire: str | None = None,
    wire_dtype: str = CallSettings.wire_dtype,
    qkv_format: str = "bshd",
    timeout: float | None = None,
) -> Any:
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
        causal: each query sees only the keys up to its own position.
        window_size: (left, right): query i sees keys i - left to i + right; -1 leaves a side open.
        cu_seqlens: offsets [0, ..., n] of packed documents in the whole sequence, the same on every
            rank. A query sees only its own document.
        mask: any other `Mask`, in place of `causal`, `window_size` and `cu_seqlens`.
        plan: a plan from `Plan.build`, or this rank's part of it, in place of mask, layout, route,
            schedule and heads. By default a plan is made, proven and kept.
        layout: which rank holds which tokens: `zigzag`, another name in
            `cp_ring.plan.layout.LAYOUTS`, or a `Layout`.
        route: `direct` sends keys straight from their owner, `ring` from neighbor to neighbor.
        schedule: how many remote sources a hop reads: `auto` (2 at first, then 4), `ring` (one),
            `gather` (all), or the hop of each ring distance, as (0, 1, 2, 2) for 4 ranks.
        heads: how many neighboring ranks exchange tokens for heads by an all-to-all: 1 is the ring
            alone, the number of all ranks is DeepSpeed-Ulysses. It divides the ranks and the query
            heads, and divides the key/value heads or is a multiple of them. `auto` is 1 in one
            node; across nodes, 1, a divisor of the ranks of a node, or the ranks of small nodes, by
            predicted time.
        softmax_scale: the factor of the scores; None is d ** -0.5.
        sink: [h], a learned softmax offset: exp(sink) is added to each denominator. Sum its
            gradient over `group`.
        return_lse: also return the differentiable log-sum-exp of the scores.
        deterministic: True for the same bits in every run; None follows
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
        timeout: seconds to wait for other ranks, from then on; a rank then names the missing one: a
            first call of a kind raises `PlanError`, others end all waiting ranks with exit code 3.

    Returns:
        out [b, s, h, e] in the dtype of q; with `return_lse` also lse [b, h, s]. Sums and lse are
        float32, or float64 for float64 inputs. A query that sees no key has out 0 and lse -inf.
        Backward computes the softmax weights again from lse: scores of size x put a relative error
        of up to 6e-8 * x into float32 gradients, on any number of ranks.

    Under `torch.autocast`, inputs of different dtypes are cast to its dtype (float64 never is);
    inputs of one dtype keep theirs. `torch.compile` breaks the graph here; make masks outside.
    Batch rows with different masks take `Mask.batch(...)` with `Layout.batch(...)`.

    Raises:
        ConfigError: arguments contradict each other, or the group cannot be used.
        PlanError: tensors, group and plan disagree; or ranks make different calls, on all ranks if
            both calls are new.
        KernelError: the kernel is unknown, not installed, or does not support these tensors.
        All three are ValueErrors, and their one line names the argument.

    Source: ring attention, Liu et al., https://arxiv.org/abs/2310.01889.
    """
    if timeout is not None:
        _watch(timeout)
    layout = CallSettings.layout if layout is None else layout
    of_plan = causal, window_size, cu_seqlens, mask, layout, route, schedule, heads
    # a plan that is given alone needs no check of others, which takes the host longer
    if plan is None or not all(map(is_, of_plan, _DEFAULTS)):
        asked = PlanOptions(*of_plan, plan)
    of_tensors = expect("qkv_format", qkv_format, str)
    if of_tensors in _DIMENSIONS:
        q, k, v = (_viewed(name, x, of_tensors) for name, x in (("q", q), ("k", k), ("v", v)))
        qkv_format = "bshd"
    latents = None
    if isinstance(k, LatentKeys):
        if v is not None:
            raise PlanError("v is given beside LatentKeys, which have the values too: leave it out")
        latents, (k, v) = k.latents(), k.expand()
    elif v is None:
        raise PlanError("v is missing: leave it out only with LatentKeys in place of k")
    for name, x in {"q": q, "k": k, "v": v, "sink": sink}.items():
        if x is not None or name != "sink":
            check_local(name, x)
    transport = transport_of_call(group, q.device, plan or layout)
    inputs = Inputs(q, k, v, sink, latents).alike()
    if plan is None:
        inputs.check()
        plan = asked.find(transport, inputs, qkv_format == "sbhd")
        if transport is not None and isinstance(layout, str):
            check_cut(transport, plan.layout, "ring_attention")
    wire = wire or ("plain" if latents is None or plan.ulysses > 1 else "latent")
    options = _made_once(
        softmax_scale, deterministic, kernel, num_slots, wire, wire_dtype, qkv_format, return_lse
    )
    out, lse, *_ = attention_of(plan, transport, options, inputs)(inputs)
    if of_tensors == "bhsd":
        out = out.transpose(1, 2)
    elif of_tensors == "thd":
        # backward of out[0] would fill another tensor
        out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
    return (out, lse) if return_lse else out


_DEFAULTS = tuple(field.default for field in fields(PlanOptions))

_DIMENSIONS = {"bhsd": 4, "thd": 3}
"""Formats whose tensors are views of the format bshd, and how many dimensions they have."""


def _viewed(name: str, x: Any, of_tensors: str) -> Tensor:
    """Return the view [b, s, h, d] of a tensor of a format in `_DIMENSIONS`."""
    if not isinstance(x, Tensor) or x.dim() != _DIMENSIONS[of_tensors]:
        shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise PlanError(
            f"qkv_format={of_tensors!r}: {name} must be a tensor of {_DIMENSIONS[of_tensors]} "
            f"dimensions, not {shape}"
        )
    return x[None] if of_tensors == "thd" else x.transpose(1, 2)


_options = RUNTIME.cache(maxsize=64, typed=True)(AttentionOptions)


def _made_once(*values: Any) -> AttentionOptions:
    try:
        return _options(*values)
    except TypeError:  # a list or the like, which no option can be, and no cache can hold
        return AttentionOptions(*values)


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
