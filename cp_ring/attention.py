"""ring_attention: the public call, and the autograd function that executes a plan.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of queries and keys,
e head size of values. Inside, tokens come first (sbhd): any token range of keys is then contiguous and travels uncopied.

The way of a key from the caller to the kernel, one Python frame a line:

    ring_attention              makes or takes the plan            (Megatron: RingDotProductAttention.forward)
    attend                      checks tensors, chooses the kernel
    _RingAttention.forward      torch's autograd function
    _run_forward                the hop loop; KeyStream hands it each hop's keys
    KernelCall.attend           cuts the call's queries and keys out of the buffers
    kernel.forward              the adapter of a kernel, at most three frames

Backward starts in `_RingAttention.backward` and goes on through `_run_backward` and `KernelCall.gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from cp_ring import arguments
from cp_ring.checks import AnyPlan, check_tensors, check_tokens, check_values, rank_plan_of, sizes_of, tokens_and_batch
from cp_ring.comm.agreement import EVERY, Fact
from cp_ring.comm.codecs import CODECS, Codec, Plain
from cp_ring.comm.heads import HeadExchange, lse_of_shard, over_heads, sub_transports
from cp_ring.comm.latent import LatentKeys, Latents
from cp_ring.comm.transport import Transport, transport_for
from cp_ring.kernels import AttentionKernel, determinism
from cp_ring.kernels.calls import Statistics, work_of
from cp_ring.kernels.dropout import Dropout
from cp_ring.kernels.logits import LogitKernel
from cp_ring.observe.spans import span, traced
from cp_ring.observe.timing import note_rank, timed
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.offload import Offload, Waiting, tensor_of
from cp_ring.ops.dtypes import in_one_dtype, sum_dtype, without_autocast
from cp_ring.ops.totals import Merge, Sum
from cp_ring.plan.head_split import split_heads
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.tables import Exchange, RankPlan
from cp_ring.plan_cache import check_mask_arguments, plan_of_call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SubGroups = tuple[dist.ProcessGroup, dist.ProcessGroup | None]
"""The group of the ranks that exchange heads, and that of a ring, None if the ring has one member."""


# fmt: off
@overload
def ring_attention(
    q: Tensor, k: Tensor | LatentKeys, v: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None, *,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), cu_seqlens: Sequence[int] | np.ndarray | Tensor | None = None,
    mask: Mask | None = None, plan: AnyPlan | None = None, layout: str | Layout = "zigzag", route: str = "direct",
    schedule: str | Sequence[int] = "auto", heads: int | str = 1, node_size: int | None = None,
    softmax_scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[False] = False,
    deterministic: bool | None = None, kernel: str = "auto", num_slots: int = 2, wire: str | None = None,
    wire_dtype: str = "input", qkv_format: str = "bshd", timeout: float | None = None,
    dropout_p: float = 0.0, dropout_seed: int | None = None, alibi_slopes: Tensor | Sequence[float] | None = None,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor | LatentKeys, v: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None, *,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), cu_seqlens: Sequence[int] | np.ndarray | Tensor | None = None,
    mask: Mask | None = None, plan: AnyPlan | None = None, layout: str | Layout = "zigzag", route: str = "direct",
    schedule: str | Sequence[int] = "auto", heads: int | str = 1, node_size: int | None = None,
    softmax_scale: float | None = None, sink: Tensor | None = None, return_lse: Literal[True],
    deterministic: bool | None = None, kernel: str = "auto", num_slots: int = 2, wire: str | None = None,
    wire_dtype: str = "input", qkv_format: str = "bshd", timeout: float | None = None,
    dropout_p: float = 0.0, dropout_seed: int | None = None, alibi_slopes: Tensor | Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]: ...
# fmt: on
@_disable_dynamo  # `torch.compiler.disable` that does not import the compiler: torch.compile leaves the call as it is
def ring_attention(
    q: Tensor,
    k: Tensor | LatentKeys,
    v: Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | np.ndarray | Tensor | None = None,
    mask: Mask | None = None,
    plan: AnyPlan | None = None,
    layout: str | Layout = "zigzag",
    route: str = "direct",
    schedule: str | Sequence[int] = "auto",
    heads: int | str = 1,
    node_size: int | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    kernel: str = "auto",
    num_slots: int = 2,
    wire: str | None = None,
    wire_dtype: str = "input",
    qkv_format: str = "bshd",
    timeout: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    alibi_slopes: Tensor | Sequence[float] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is sharded across the ranks of `group`; differentiable.

    Every rank of `group` makes the same call with its own shard of the sequence (`cp_ring.shard` cuts it). It is the
    counterpart of flash-attn's `flash_attn_func(q, k, v, causal=..., window_size=...)` and of torch's
    `scaled_dot_product_attention` for a sequence that one device does not hold.

    Args:
        q: queries [b, s, h, d] of this rank; s is the number of its tokens. float16, bfloat16, float32 or float64.
        k: keys [b, s, g, d], where g divides h (grouped-query attention). Only the g heads travel. Or `LatentKeys`, the latents
            of multi-latent attention, from which keys and values are made.
        v: values [b, s, g, e]; e may differ from d. None with `LatentKeys`.
        group: the context-parallel ranks: a ProcessGroup, a one-dimensional DeviceMesh, a transport (such as a rank of
            `cp_ring.testing.local_ring.LocalRing`), or None for a single rank.
        causal: each query sees only keys at its own position and before it.
        window_size: (left, right) as in flash-attn: query i sees keys i - left to i + right; -1 leaves a side open.
        cu_seqlens: where packed documents begin and end in the whole sequence, [0, ..., n], as in flash-attn's varlen functions.
            Documents do not see one another. The offsets are those of the whole sequence, the same on every rank.
        mask: any other mask, as a `Mask`: `Mask.prefix`, `Mask.documents`, `Mask.batch`, ... It replaces `causal`, `window_size`
            and `cu_seqlens`. FlexAttention's `mask_mod` functions are not supported, because a plan needs the mask as intervals:
            `Mask.causal(n)` is the closest to a causal mask_mod, `Mask.causal(n, window=(w, 0))` to a sliding window,
            `Mask.documents(cu_seqlens)` to a document mask, `Mask.prefix(n, length)` to a prefix-LM mask.
        plan: a plan made with `Plan.build`, or this rank's part of it. It replaces mask, layout, route, schedule and heads.
            Without one, a plan is made for the given mask and layout, proven, and kept for later calls with the same arguments.
        layout: which rank holds which tokens: `zigzag` (the default, and that of `cp_ring.shard`), another name in
            `cp_ring.plan.layout.LAYOUTS`, or a `Layout`. Without `mask`, `cu_seqlens` or a `Layout`, all ranks must hold
            equally many tokens.
        route: how keys reach the ranks that need them, a name in `cp_ring.plan.routes.ROUTES`, or `auto`: the one of least
            predicted time (`cp_ring.plan.shapes`).
        schedule: at which hop a rank uses the keys of which others: `auto`, chosen by a model of the time; `ring`, one source a
            hop; `gather`, all remote sources in one hop; or the hop of each ring distance, as (0, 1, 2, 2) for 4 ranks.
        heads: how many neighboring ranks of `group` exchange tokens for heads by an all-to-all. Each then computes its part of
            the query heads for the tokens of all of them, and the ring has as many times fewer members. It must divide the ranks
            and the query heads. The number of all ranks is DeepSpeed-Ulysses, 1 the ring alone, `auto` that of least predicted
            time.
        node_size: neighboring ranks of `group` on one node, by which the routes `direct` and `relay` go. None is what torchrun or
            Slurm told this process, and 1 for a transport.
        softmax_scale: factor of the scores; d ** -0.5 by default.
        sink: [h], a learned softmax offset: exp(sink) is added to the softmax denominator of each query. Zeros give the
            off-by-one softmax. Its gradient is this rank's share; sum it over `group`, as for any replicated parameter.
        return_lse: also return the log-sum-exp of the scores. Gradients flow through `out` only.
        deterministic: True asks for the same bits in every run, False does not; None follows
            `torch.use_deterministic_algorithms`.
        kernel: `auto`, or a name in `cp_ring.kernels.REGISTRY`.
        num_slots: receive buffers for keys and values, 2 to 8. Memory grows with it, not with the number of ranks.
        wire: how keys and values travel: `plain`, as they are; `int8` or `fp8`, quantized by token and head, so a quarter of the
            bytes of float32 and half of those of bfloat16, at the cost of accuracy; `latent`, as latents, which the reader
            multiplies by the up-projection. A rank's own keys stay exact. None is `latent` for `LatentKeys`, else `plain`. The
            gradient of the up-projection is this rank's share; sum it over `group`, as for any replicated parameter.
        wire_dtype: the dtype in which partial gradients of keys and values travel: `input`, `float32` or `bfloat16`.
        qkv_format: `bshd`, or `sbhd` for tensors [s, b, heads, head size]; `out` has the same format.
        timeout: seconds that this process may wait for other ranks. A thread watches the waits from then on, in backward and in
            other collectives too. A rank that waits for longer prints where it is and names the rank that is stuck or does not
            call; all ranks that wait end, with exit code 3. None starts no such thread. It needs a process group.
        dropout_p: the probability with which an attention weight is dropped, from 0 to below 1. Which ones are dropped depends on
            `dropout_seed`, head, batch row and positions alone, so they are the same on any number of ranks. The kernels `cpu`
            and `reference` support it, and hold the scores of some queries at a time.
        dropout_seed: a whole number of up to 64 bits, the same on all ranks, and another one in each call.
        alibi_slopes: [h], ALiBi: a score of head i gets - alibi_slopes[i] * |query - key|, by positions in the sequence, or in
            the batch row. The slopes are constants of all query heads of the call. The kernels `cpu` and `reference` support it,
            and hold the scores of some queries at a time.

    Returns:
        out [b, s, h, e] in the dtype of q; with `return_lse` also lse [b, h, s] in float32 (float64 for float64 inputs).
        Queries that see no key have out 0 and lse -inf. Sums are accumulated in float32 (float64 for float64 inputs).
        Backward computes the softmax weights again from lse in float32, so scores of size x put a relative error of up to
        6e-8 * x into the gradients, on any number of ranks: 2e-3 for scores of 3e4. float64 inputs avoid it.

    Under `torch.autocast` the call computes in the dtype of q, k and v, forward and backward, and out has this dtype. Where their
    dtypes differ, they are cast to that of autocast first; float64 is never cast.

    In a `torch.compile` region the call is a graph break: planning and messages run as they do without compilation.

    Where batch rows have different masks, give `Mask.batch(...)` with `Layout.batch(...)`, or a plan for them.

    Raises:
        ConfigError: arguments that contradict each other, or a group that cannot be used.
        PlanError: tensors, group and plan that disagree; on all ranks, where ranks of the group make different calls. They
            are compared when a call is new to the group (`cp_ring.comm.agreement`).
        KernelError: the kernel is unknown, not installed, or cannot compute such tensors.
        All three are ValueErrors whose one line names the argument.

    Ring attention: Liu et al., https://arxiv.org/abs/2310.01889.
    """
    if timeout is not None:
        arguments.watch(timeout)
    k, v, latents = arguments.keys_and_values(k, v)
    check_mask_arguments(plan, mask, causal, window_size, cu_seqlens, layout, route, schedule, heads, node_size)
    if plan is None:
        transport, (tokens, batch) = transport_for(group, q.device), tokens_and_batch(q, qkv_format)
        rank, size = (transport.rank, transport.size) if transport else (0, 1)
        plan = plan_of_call(
            tokens, batch, rank, size,
            causal=causal, window_size=window_size, cu_seqlens=cu_seqlens, mask=mask, layout=layout, route=route,
            schedule=schedule, heads=heads, node_size=arguments.node_size_of_group(transport) if node_size is None else node_size,
            sizes=sizes_of(q, k, v, batch),
        )  # fmt: skip
    by_position = arguments.by_position_of(plan, group, q, qkv_format, dropout_p, dropout_seed, alibi_slopes)
    out, lse = attend(
        q, k, v, plan, group,
        softmax_scale=softmax_scale, sink=sink, kernel=kernel, num_slots=num_slots,
        wire=wire or arguments.default_wire(plan, latents, by_position), latents=latents, wire_dtype=wire_dtype,
        qkv_format=qkv_format, deterministic=deterministic, return_lse=return_lse, dropout=by_position,
    )  # fmt: skip
    if not return_lse:
        return out
    assert lse is not None, "an lse that was asked for is missing"
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AnyPlan,
    group: dist.ProcessGroup | DeviceMesh | Transport | None,
    *,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
    num_slots: int = 2,
    wire: str = "plain",
    latents: Latents | None = None,
    wire_dtype: str = "input",
    qkv_format: str = "bshd",
    deterministic: bool | None = None,
    return_lse: bool = False,
    results: Results | None = None,
    compare_every: int = EVERY,
    sub_groups: SubGroups | None = None,
    dropout: Dropout | None = None,
    largest: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`ring_attention` with a plan, for callers inside cp_ring; returns out and lse, None if it is not asked for.

    `results` is for the recomputation of activations. A call with empty `results` fills them. A later call with the same
    inputs on every rank takes out and lse from them instead of computing and sending; its backward is the usual one.
    `compare_every` is `every` of `Agreement.check`. `sub_groups` are groups of the ranks that exchange heads and of those of a
    ring, where such groups exist; else the messages of both go over the connections of `group`. `latents` are what k and v were
    made from, and what travels with `wire="latent"`. To `largest` is appended the largest logit of each query head, float32 [h],
    of the tiles of this rank, where they are computed; with the exchange of heads, -inf for the heads of other ranks.
    """
    check_values(num_slots, wire, wire_dtype, qkv_format, softmax_scale)
    q, k, v, *more = in_one_dtype(q, k, v, *(latents or ()))
    latents = Latents(*more) if more else latents
    check_tensors(q, k, v, sink)
    transport = transport_for(group, q.device)
    rank_plan = rank_plan_of(plan, transport)
    inputs = arguments.codec_inputs(wire, latents, rank_plan, qkv_format)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    chosen, exact = arguments.kernel_of(kernel, q, v, rank_plan, deterministic, dropout, logits=largest is not None)
    q, k, v = (arguments.tokens_first(x, qkv_format) for x in (q, k, v))
    batch = q.shape[1]
    if dropout is not None:
        q, k = arguments.marked(q, k, dropout, wire)
    if rank_plan.batch == batch > 1:
        q, k, v, *inputs[:1] = (arguments.one_stream(x) for x in (q, k, v, *inputs[:1]))
    check_tokens(q, k, v, rank_plan)
    call = _Call(
        rank_plan=rank_plan,
        transport=transport if rank_plan.cp > 1 else None,
        kernel=chosen,
        scale=scale,
        num_slots=num_slots,
        codec=CODECS[wire] if rank_plan.cp > 1 else Plain,
        wire_dtype=arguments.wire_dtype_of(wire_dtype, q.dtype),
        exact=exact,
        place=results.at(WATCH.place) if results is not None else WATCH.place,
        results=results,
        rank=arguments.rank_in_job(transport),
    )
    _agree(call, rank_plan, q, k, v, sink, inputs, dropout, compare_every)
    if rank_plan.exchange is not None:
        out, lse = _attend_over_heads(call, rank_plan.exchange, q, k, v, sink, sub_groups, return_lse)
    else:
        out, lse = _RingAttention.apply(q, k, v, sink, call, *inputs)
    if largest is not None and isinstance(chosen, LogitKernel) and chosen.largest is not None:
        largest.append(chosen.largest)
    if out.shape[1] != batch:
        out, lse = arguments.batch_rows(out, lse, batch)
    return arguments.tokens_first(out, qkv_format), lse


def _attend_over_heads(
    call: _Call, places: Exchange, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, groups: SubGroups | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the ring for this rank's heads, one group of them after another, with the exchange of heads around it."""
    assert call.transport is not None, "heads are exchanged by one rank"
    note_rank(call.rank, q.device)
    ulysses = call.rank_plan.ulysses
    neighbors, ring = sub_transports(call.transport, ulysses)
    if groups is not None:
        neighbors, ring = transport_for(groups[0], q.device) or neighbors, transport_for(groups[1], q.device)
    split = split_heads(q.shape[2], k.shape[2], ulysses)
    exchange = HeadExchange(neighbors, places, split)

    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
        results = None if call.results is None else call.results.of_group(group)
        kernel = call.kernel.anew() if isinstance(call.kernel, LogitKernel) else call.kernel
        of_ring = replace(call, kernel=kernel, transport=ring, results=results, codec=call.codec if ring else Plain)
        found: tuple[Tensor, Tensor] = _RingAttention.apply(q, k, v, sink, of_ring)
        if isinstance(call.kernel, LogitKernel) and isinstance(kernel, LogitKernel):
            call.kernel.add(kernel, split.queries[group][exchange.place][0], split.heads)
        return found

    out, lses = over_heads(exchange, q, k, v, sink, attention)
    return out, lse_of_shard(exchange, lses) if return_lse else None


@dataclass
class Results:
    """Out [s, b, h, e] in the dtype of q and lse [b, h, s] of one forward pass, kept for its recomputation; empty at first.

    With the exchange of heads, those of each group of heads are kept apart. With `offload` they wait in host memory.
    """

    out: Tensor | Waiting | None = None
    lse: Tensor | Waiting | None = None
    place: Place | None = None
    groups: dict[int, Results] = field(default_factory=dict)
    offload: Offload | None = None

    def of_group(self, group: int) -> Results:
        """The results of a group of heads."""
        return self.groups.setdefault(group, Results(offload=self.offload))

    def fill(self, out: Tensor, lse: Tensor) -> None:
        # Copies: the caller owns the tensors of the first run and may change them in place.
        self.out, self.lse = out.detach().clone(), lse.detach().clone()
        if self.offload is not None:
            self.out, self.lse = self.offload.put(self.out, self.lse)

    def at(self, place: Place) -> Place:
        """The place of the call that fills the results; the call that takes them has the same place."""
        self.place = self.place or place
        return self.place

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Out and lse, which are removed from here; None if empty."""
        out, lse, self.out, self.lse = self.out, self.lse, None, None
        return None if out is None or lse is None else (tensor_of(out), tensor_of(lse))

    def size(self) -> int:
        """Bytes that are held."""
        own = sum(x.nbytes for x in (self.out, self.lse) if x is not None)
        return own + sum(results.size() for results in self.groups.values())


@dataclass(frozen=True)
class _Call:
    """What forward and backward of one call share.

    `codec` is a class of codecs; `exact` asks for determinism; `rank` is that in the whole job.
    """

    rank_plan: RankPlan
    transport: Transport | None
    kernel: AttentionKernel
    scale: float
    num_slots: int
    codec: type[Codec]
    wire_dtype: torch.dtype
    exact: bool
    place: Place
    results: Results | None
    rank: int


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        WATCH.place, WATCH.backward = call.place, False
        # Once a call: some kernels copy a strided q, which every hop would repeat.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        kept = call.results.take() if call.results is not None else None
        if kept is not None:
            out, lse = kept
        else:
            with without_autocast(q.device):
                with determinism(call.exact), torch.cuda.device_of(q), timed(call.rank, call.place, "forward", q.device):
                    # A sink changes out once more: it is not rounded before.
                    dtype = q.dtype if sink is None else sum_dtype(q.dtype)
                    out, lse = _run_forward(call, q, k, v, inputs, dtype)
                if sink is not None:
                    lse, out = _add_sink(out, lse, sink), out.to(q.dtype)
            if call.results is not None:
                call.results.fill(out, lse)
        ctx.save_for_backward(q, k, v, sink, out, lse, *inputs)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, sink, out, lse, *inputs = ctx.saved_tensors
        # Other ranks wait for this rank's messages, also where nothing depends on its out.
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        call = ctx.call
        WATCH.place, WATCH.backward = call.place, True
        with without_autocast(q.device):
            with determinism(call.exact), torch.cuda.device_of(q), timed(call.rank, call.place, "backward", q.device):
                dq, dk, dv, *others = _run_backward(call, dout, q, k, v, inputs, out, lse)
            dsink = None if sink is None else _sink_gradient(dout, out, lse, sink)
        return dq, dk, dv, dsink, None, *others


def _run_forward(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The hop loop: while a hop is computed, the keys of the next hop travel. Out [s, b, h, e] in `dtype`, lse [b, h, s]."""
    work = work_of(call.rank_plan, call.kernel.capabilities, q.device)
    total = Merge(work.queries, (*q.shape[:3], v.shape[-1]), q, dtype)
    for hop, k_hop, v_hop in call.codec(k, v, *inputs).keys(call.rank_plan, work.hops, call.transport, call.num_slots):
        with span("forward", hop):
            for kernel_call in traced(work.calls[hop]):
                total.add(*kernel_call.attend(call.kernel, q, k_hop, v_hop, call.scale))
    return total.finish()


def _run_backward(
    call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """The hop loop of backward: partial gradients of the last hop's keys travel home while the next hop is computed."""
    work = work_of(call.rank_plan, call.kernel.capabilities, q.device, backward=True)
    codec = call.codec(k, v, *inputs)
    keys = codec.keys(call.rank_plan, work.hops, call.transport, call.num_slots, backward=True)
    grads = codec.gradients(call.rank_plan, work, call.transport, call.wire_dtype)
    statistics, total = Statistics(lse), Sum(work.queries, [q.shape], q, q.dtype)
    for hop, k_hop, v_hop in keys:
        grads.start(hop)
        with span("backward", hop):
            for kernel_call in traced(work.calls[hop]):
                dq, dk, dv = kernel_call.gradients(call.kernel, dout, q, k_hop, v_hop, out, statistics, call.scale)
                total.add(dq)
                grads.add(dk, dv)
        grads.send(hop)
    return *total.finish(), *grads.finish()


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Counts exp(sink) into the denominators: scales out [s, b, h, e] in place, returns the new lse [b, h, s]."""
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out *= _weight(lse, with_sink).permute(2, 0, 1)[..., None]
    return with_sink


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Of softmax with a sink: -sum over queries of exp(sink - lse) * (dout . out), [h]."""
    share = _weight(sink.to(lse.dtype)[:, None], lse)
    # Queries that see no key have out 0: their dout, which may be NaN in padding, does not count.
    product = torch.where(out == 0, 0.0, dout.to(lse.dtype) * out).sum(-1).permute(1, 2, 0)
    return -(share * product).sum((0, 2)).to(sink.dtype)


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), and 0 where both are -inf."""
    return torch.where(whole == -math.inf, 0.0, (part - whole).exp())


def _agree(
    call: _Call, rank_plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    inputs: Sequence[Tensor], dropout: Dropout | None, every: int,
) -> None:  # fmt: skip
    """Raises `PlanError` on all ranks where the ranks of the transport make different calls; q, k, v have tokens first."""
    agree = getattr(call.transport, "agree", None)
    if agree is None:
        return
    p, key, slopes = (0.0, 0, ()) if dropout is None else (dropout.p, dropout.key, dropout.slopes)
    values = (q.dtype, q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], call.scale, call.codec.name,
              call.wire_dtype, sink is not None, Latents(*inputs).sizes if inputs else (), p, slopes)  # fmt: skip
    names = ("dtype", "batch", "query heads", "key/value heads", "head size", "head size of values", "softmax_scale",
             "wire", "wire_dtype", "sink", "sizes of latents", "dropout_p", "alibi_slopes")  # fmt: skip

    def facts() -> list[Fact]:
        plan = [Fact(*part) for part in rank_plan.identity]
        seed = Fact.of("dropout_seed", key)  # not in the key: another one is no new call
        return [*plan, seed, *(Fact.of(name, value) for name, value in zip(names, values, strict=True))]

    agree((rank_plan.digest, *values), facts, every)
