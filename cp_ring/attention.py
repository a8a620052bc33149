"""ring_attention: the autograd function that executes a RingPlan.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of queries and keys,
e head size of values. Inside, tokens come first (sbhd): any token range of keys is then contiguous and travels uncopied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from cp_ring.comm.streams import GradStream, KeyStream
from cp_ring.comm.transport import Transport, transport_for
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import PlanError
from cp_ring.kernels import AttentionKernel, choose, determinism
from cp_ring.kernels.calls import Statistics, prepare, program
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.plan.ring_plan import RingPlan
from cp_ring.plan.tables import RankPlan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan | RankPlan,
    group: dist.ProcessGroup | Transport | None = None,
    *,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
    num_slots: int = 2,
    wire_dtype: str = "input",
    qkv_format: str = "bshd",
    results: Results | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Attention of a sequence that is sharded over `group` as `plan` says; differentiable.

    Every rank of `group` calls it with its own shard, `plan.layout.shard(x, rank, dim)` of the whole; `plan` may also be its own
    row of the plan alone, `RingPlan.build_rank_plan`.

    q [b, s, h, d], k [b, s, g, d], v [b, s, g, e] ("sbhd": [s, b, ...]) to out [b, s, h, e]; g divides h, and only the
    g heads travel. Any floating-point dtype; accumulation is in float32 (float64 for float64). `softmax_scale` defaults
    to d ** -0.5. `sink` [h] adds exp(sink) to each row's softmax denominator (a learned softmax offset; zeros give the
    off-by-one softmax); its gradient is this rank's share, to be summed over `group` as that of any replicated parameter.
    `wire_dtype` is the dtype in which partial gradients travel: "input" or "float32".
    `deterministic` wants the same bits in every run, which takes a kernel that promises them; None does as
    `torch.use_deterministic_algorithms` says.

    `group` may be None where the plan has one rank, or a transport such as a rank of `cp_ring.testing.local_ring.LocalRing`.
    Where batch rows have different masks, the plan is for the stream of b * n tokens in which row follows row
    (`Mask.batch`, `Layout.batch`), and each rank passes its part of every row.

    Empty `results` are filled, for another call with the same inputs on every rank, as where activations are recomputed: that
    call takes out and lse from them and leaves them empty; it computes and sends nothing, and its backward is the usual one.

    Raises `PlanError` when tensors, group and plan disagree, `KernelError` when the kernel cannot do the job.

    Ring attention: Liu et al., https://arxiv.org/abs/2310.01889.
    """
    ContextParallelConfig.make(num_slots=num_slots, wire_dtype=wire_dtype)
    if qkv_format not in ("bshd", "sbhd"):
        raise PlanError(f"qkv_format {qkv_format!r}: it is bshd or sbhd")
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise PlanError(f"softmax_scale {softmax_scale}: it must be a finite number above 0")
    _check_tensors(q, k, v, sink)
    if qkv_format == "bshd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    transport = None if group is None else transport_for(group, q.device)
    row, batch = _row(plan, transport), q.shape[1]
    if row.batch == batch > 1:
        q, k, v = (x.transpose(0, 1).flatten(0, 1)[:, None] for x in (q, k, v))
    _check_rows(q, k, v, row)
    with determinism(deterministic) as exact:
        chosen = choose(kernel, device=q.device, dtype=q.dtype, d=q.shape[-1], e=v.shape[-1], packed=row.packed)
    run = _Run(
        row=row,
        transport=transport if plan.cp > 1 else None,
        kernel=chosen,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        num_slots=num_slots,
        wire_dtype=q.dtype if wire_dtype == "input" else torch.promote_types(q.dtype, torch.float32),
        sums=torch.promote_types(q.dtype, torch.float32),
        results=results,
        exact=exact,
        place=results.at(WATCH.place) if results is not None else WATCH.place,
    )
    out: Tensor = _RingAttention.apply(q, k, v, sink, run)
    if out.shape[1] != batch:
        out = out[:, 0].unflatten(0, (batch, -1)).transpose(0, 1)
    return out.transpose(0, 1) if qkv_format == "bshd" else out


@dataclass
class Results:
    """What the forward pass of one call made: out [s, b, h, e] in the dtype of q, lse [b, h, s] in that of sums; or nothing."""

    out: Tensor | None = None
    lse: Tensor | None = None
    place: Place | None = None

    def fill(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out.detach(), lse

    def at(self, place: Place) -> Place:
        """The place of the call that fills them, also for the one that takes from them."""
        self.place = self.place or place
        return self.place

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Out and lse, which are no longer here then; None if there are none."""
        out, lse, self.out, self.lse = self.out, self.lse, None, None
        return None if out is None or lse is None else (out, lse)

    def size(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for x in (self.out, self.lse) if x is not None)


@dataclass(frozen=True)
class _Run:
    """What one call is made with. `sums` is the dtype of everything that is accumulated; `exact` wants determinism."""

    row: RankPlan
    transport: Transport | None
    kernel: AttentionKernel
    scale: float
    num_slots: int
    wire_dtype: torch.dtype
    sums: torch.dtype
    place: Place = field(default_factory=Place)
    results: Results | None = None
    exact: bool = False


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, run: _Run) -> Tensor:  # type: ignore[no-untyped-def]
        WATCH.place, WATCH.backward = run.place, False
        q = q if q.stride(-1) == 1 else q.contiguous()
        k, v = k.contiguous(), v.contiguous()
        out, lse = (run.results.take() if run.results is not None else None) or _results(run, q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, sink, out, lse = ctx.saved_tensors
        WATCH.place, WATCH.backward = ctx.run.place, True
        with determinism(ctx.run.exact), torch.cuda.device_of(q):
            dq, dk, dv = _backward(ctx.run, dout.contiguous(), q, k, v, out, lse)
        dsink = None if sink is None else _sink_gradient(dout, out, lse, sink)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None


def _results(run: _Run, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out [s, b, h, e] in the dtype of q, and lse [b, h, s] with the sink in it."""
    with determinism(run.exact), torch.cuda.device_of(q):
        out, lse = _forward(run, q, k, v)
    if sink is not None:
        lse = _add_sink(out, lse, sink)
    out = out.to(q.dtype)
    if run.results is not None:
        run.results.fill(out, lse)
    return out, lse


def _forward(run: _Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The hop loop: while a hop's tiles are computed, the next hop's keys travel. Out [s, b, h, e], lse [b, h, s]."""
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=run.sums)
    lse = q.new_full((q.shape[1], q.shape[2], q.shape[0]), -math.inf, dtype=run.sums)
    prepare(run.row.hops, run.kernel.capabilities, q.device)
    for hop, k_hop, v_hop in KeyStream(run.row, run.transport, k, v, run.num_slots):
        with record_function(f"cp_ring: forward, hop {hop.index}"):
            for step in program(hop, run.kernel.capabilities):
                step.forward_(run.kernel, q, k_hop, v_hop, out, lse, run.scale)
    return out, lse


def _backward(run: _Run, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """As forward; besides the next keys, the last hop's partial gradients travel to the owners of their keys."""
    dq = torch.zeros_like(q, dtype=run.sums, memory_format=torch.contiguous_format)
    keys = KeyStream(run.row, run.transport, k, v, run.num_slots, backward=True)
    prepare(run.row.backward, run.kernel.capabilities, q.device)
    statistics = Statistics(lse)
    grads = GradStream(run.row, run.transport, k, v, run.sums, run.wire_dtype)
    for hop, k_hop, v_hop in keys:
        dk, dv = grads.start(hop)
        with record_function(f"cp_ring: backward, hop {hop.index}"):
            for step in program(hop, run.kernel.capabilities):
                step.backward_(run.kernel, dout, q, k_hop, v_hop, out, statistics, dq, dk, dv, run.scale)
        grads.send(hop)
    return dq, *grads.finish()


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Counts exp(sink) into the denominators: scales out [s, b, h, e] in place, returns the new lse [b, h, s]."""
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out *= _weight(lse, with_sink).permute(2, 0, 1)[..., None]
    return with_sink


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Of softmax with a sink: -sum over rows of exp(sink - lse) * (dout . out), [h]."""
    share = _weight(sink.to(lse.dtype)[:, None], lse)
    product = (dout.to(lse.dtype) * out).sum(-1).permute(1, 2, 0)
    return -(share * product).sum((0, 2)).to(sink.dtype)


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), and 0 where both are -inf: nothing of nothing."""
    return torch.where(whole == -math.inf, 0.0, (part - whole).exp())


def _row(plan: RingPlan | RankPlan, transport: Transport | None) -> RankPlan:
    if transport is None and plan.cp > 1:
        raise PlanError(f"the plan is for {plan.cp} ranks: pass their process group")
    if transport is not None and transport.size != plan.cp:
        raise PlanError(f"the plan is for {plan.cp} ranks, the group has {transport.size}")
    rank = transport.rank if transport else 0
    row = plan if isinstance(plan, RankPlan) else plan.rank_plan(rank)
    if row.rank != rank:
        raise PlanError(f"the plan is that of rank {row.rank} alone, and this is rank {rank}")
    return row


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise PlanError(f"q, k and v have 4 dimensions, batch, tokens, heads and head size; here {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise PlanError(f"q, k and v share one floating-point dtype of 16 to 64 bits; here {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise PlanError(f"q, k and v are on one device; here {q.device}, {k.device}, {v.device}")
    if 0 in (*q.shape[2:], *k.shape[2:], v.shape[3]):
        raise PlanError(f"there is at least one head, of size at least 1; here {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise PlanError(
            f"batch sizes and tokens agree, q and k share a head size, key/value heads divide query heads; here {shapes}"
        )
    if sink is not None and (sink.shape != q.shape[2:3] or not sink.is_floating_point() or sink.device != q.device):
        raise PlanError(
            f"sink is one number for each of {q.shape[2]} query heads on {q.device}, not {tuple(sink.shape)} of {sink.dtype} "
            f"on {sink.device}"
        )


def _check_rows(q: Tensor, k: Tensor, v: Tensor, row: RankPlan) -> None:
    """q, k, v are tokens first."""
    if any(x.shape[0] != row.num_tokens for x in (q, k, v)):
        rows = f" ({row.batch} batch rows of {row.num_tokens // row.batch})" if row.batch > 1 else ""
        raise PlanError(f"rank {row.rank} holds {row.num_tokens} tokens of the layout{rows}, the tensors {q.shape[0]}")
