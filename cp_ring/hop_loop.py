"""The hop loop: forward and backward of one call around one ring, and torch's autograd function
around both.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of
queries and keys, e head size of values. Queries, out and their gradients have the batch first, as
kernels read them. Keys, values and theirs have tokens first: any token range is then contiguous and
travels uncopied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cp_ring.comm.agreement import Backward
from cp_ring.comm.plain import Plain
from cp_ring.comm.transport import Transport, joining
from cp_ring.kernels import AttentionKernel, determinism
from cp_ring.kernels.queries import Queries
from cp_ring.kernels.work import Work, work_of
from cp_ring.observe.spans import span
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.ops.dtypes import on_device, sum_dtype, waited, without_autocast
from cp_ring.ops.once import once_differentiable
from cp_ring.ops.totals import Merge, Sum
from cp_ring.plan.message_order import message_order
from cp_ring.plan.proof import check_order
from cp_ring.plan.records import RankPlan, Turn

Pass = tuple[Work, Sequence[Turn]]
"""The kernel calls and updates of a pass, and the order of its messages."""

Merged = tuple[Tensor, Tensor, Tensor | None]
"""out [b, s, h, e] and lse [b, h, s] of all keys, and the gradient of lse, if it has one."""


@dataclass(frozen=True, eq=False)
class Ring:
    """The settings that all calls around one ring share.

    `codec` is a class of codecs; `exact` asks for determinism. With `bshd` tensors of queries, keys
    and values have the batch first, [b, s, ...], here tokens first. `passes` has the work and the
    order of messages of forward and of backward, each from its first call on.
    """

    codec: type[Plain]
    bshd: bool
    scale: float
    num_slots: int
    wire_dtype: torch.dtype
    exact: bool
    shares_heads: bool
    passes: dict[bool, Pass] = field(default_factory=dict)


class RingCall(NamedTuple):
    """The objects that forward and backward of one call share. It keeps plan and transport alive,
    which the ring does not. `begin_backward` compares the order of backward calls.
    """

    ring: Ring
    rank_plan: RankPlan
    transport: Transport | None
    kernel: AttentionKernel
    place: Place
    begin_backward: Backward | None

    def of_queries(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Turn the caller's tensors into [b, s, ...], or back."""
        return tensors if self.ring.bshd else [x.transpose(0, 1) for x in tensors]

    def of_keys(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Turn the caller's tensors into [s, b, ...], or back."""
        return [x.transpose(0, 1) for x in tensors] if self.ring.bshd else tensors

    def start_backward(self) -> None:
        """Note that backward begins."""
        WATCH.place, WATCH.backward = self.place, True
        if self.begin_backward is not None:
            self.begin_backward(self.place)

    def of_pass(self, device: torch.device, backward: bool) -> Pass:
        """Return forward, or backward, of this call's rank; it is made once."""
        ring, part = self.ring, self.rank_plan
        if backward not in ring.passes:
            work = work_of(part, self.kernel, device, backward, backward and ring.shares_heads)
            order = message_order(part, ring.num_slots, backward)
            check_order(order, part, ring.num_slots, backward)
            ring.passes[backward] = work, order
        return ring.passes[backward]


class RingAttention(torch.autograd.Function):
    """Computes out [s, b, h, e] in the dtype of q, and lse [b, h, s], from q [s, b, h, d], k [s, b,
    g, d] and v [s, b, g, e]; with `Ring.bshd`, batch and tokens change places in all but lse. No
    view of autograd does that, which takes the host twice the time.

    `inputs` are the codec's inputs beside k and v. `taken` is out and lse of an earlier call with
    the same inputs on every rank: then forward computes and sends nothing.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        call: RingCall,
        taken: tuple[Tensor, Tensor] | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        WATCH.place, WATCH.backward = call.place, False
        # Once a call: some kernels copy a strided q, which every hop would repeat.
        q = waited(q).contiguous()
        k, v = [x.contiguous() for x in call.of_keys(waited(k), waited(v))]
        if taken is None:
            with determinism(call.ring.exact), without_autocast(q.device), on_device(q):
                # A sink changes out once more, so out is not rounded before.
                dtype = q.dtype if sink is None else sum_dtype(q.dtype)
                (queries,) = call.of_queries(q)
                out, lse = _run_forward(call, queries, k, v, inputs, dtype)
                if sink is not None:
                    out, lse = _add_sink(out, lse, sink, q.dtype)
            # Callers may change the result in place, which autograd forbids for views.
            (out,) = call.of_queries(out)
            out = out.data
        else:
            out, lse = taken
        ctx.save_for_backward(q, k, v, sink, out, lse, *inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[no-untyped-def]
        ctx, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse, *inputs = ctx.saved_tensors
        call = ctx.call
        # Other ranks wait for this rank's messages even if nothing depends on its out.
        dout = torch.zeros_like(out) if dout is None else waited(dout).contiguous()
        q, out, dout = call.of_queries(q, out, dout)
        # dlse of queries that see no key may be NaN, and does not count.
        dlse = None if dlse is None else dlse.masked_fill(lse == -math.inf, 0.0)
        call.start_backward()
        with determinism(call.ring.exact), without_autocast(q.device), on_device(q):
            merged = out, lse, dlse
            dq, dk, dv, *others = _run_backward(call, dout, q, k, v, inputs, merged)
            dsink = None if sink is None else _sink_gradient(dout, merged, sink)
        return None, None, *call.of_queries(dq), *call.of_keys(dk, dv), dsink, *others


def _run_forward(
    call: RingCall, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run the hop loop: while a hop is computed, the keys of the next hop travel. Returns out [b,
    s, h, e] in `dtype` and lse [b, h, s].
    """
    ring, (work, order) = call.ring, call.of_pass(q.device, backward=False)
    queries, total = Queries(q), Merge.of_queries(work.queries, q, v.shape[-1], dtype)
    for hop, k_hop, v_hop in ring.codec(k, v, *inputs).keys(order, call.transport):
        with span("forward", hop):
            for kernel_call in work.calls[hop]:
                total.add(*kernel_call.attend(call.kernel, queries, k_hop, v_hop, ring.scale))
        del k_hop, v_hop  # else they would live while the next keys begin to arrive
    return total.finish()


def _run_backward(
    call: RingCall,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Sequence[Tensor],
    merged: Merged,
) -> tuple[Tensor, ...]:
    """Run the hop loop of backward: partial gradients of the last hop's keys travel to their owners
    while the next hop is computed.
    """
    (out, lse, dlse), ring = merged, call.ring
    work, order = call.of_pass(q.device, backward=True)
    codec, transport = ring.codec(k, v, *inputs), joining(call.transport)
    updates = work.own_keys if codec.needs_latents else work.keys
    grads = codec.gradients(updates, transport, ring.wire_dtype)
    queries = Queries(dout, q, out, lse=lse)
    total = Sum.of_queries(work.queries, q, q.shape[-1], q.dtype)
    if dlse is not None:
        # The gradient of a score is weight * (dout . v - dout . out). With a dout of 1 in the first
        # channel, values of 0, and -dlse as out, it is weight * dlse, from any kernel.
        one, minus = torch.zeros_like(dout), torch.zeros_like(out)
        one[..., 0], minus[..., 0] = 1.0, -dlse.transpose(1, 2)
        of_lse = Queries(one, q, minus, lse=lse)
    zeros = v
    for hop, k_hop, v_hop in codec.keys(order, transport):
        of_keys = grads.start(hop)
        if dlse is not None and (zeros is v or zeros.shape != v_hop.shape):
            zeros = torch.zeros_like(v_hop)
        with span("backward", hop):
            for kernel_call in work.calls[hop]:
                dq, dk, dv = kernel_call.gradients(call.kernel, queries, k_hop, v_hop, ring.scale)
                if dlse is not None:
                    more = kernel_call.gradients(call.kernel, of_lse, k_hop, zeros, ring.scale)
                    dq, dk = dq + more[0], dk + more[1]
                total.add(dq)
                of_keys.add(dk, dv)
                del dq, dk, dv  # else they would live through the next call
        del k_hop, v_hop
        grads.send(hop)
    return *total.finish(), *grads.finish()


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out [b, s, h, e] in `dtype` and lse [b, h, s] with exp(sink) added to the
    denominators. `out` stays, because a selective checkpoint may keep it as a kernel's own.
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    scaled = torch.empty_like(out, dtype=dtype)
    torch.mul(out, _weight(lse, with_sink).transpose(1, 2)[..., None], out=scaled)
    return scaled, with_sink


def _sink_gradient(dout: Tensor, merged: Merged, sink: Tensor) -> Tensor:
    """Return the gradient of the sink: -sum over queries of exp(sink - lse) * (dout . out - dlse),
    [h].
    """
    out, lse, dlse = merged
    share = _weight(sink.to(lse.dtype)[:, None], lse)
    # Queries that see no key have out 0: their dout, which may be NaN in padding, does not count.
    product = torch.where(out == 0, 0.0, dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return -(share * (product if dlse is None else product - dlse)).sum((0, 2)).to(sink.dtype)


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """Return exp(part - whole), and 0 where both are -inf."""
    return torch.where(whole == -math.inf, 0.0, (part - whole).exp())
