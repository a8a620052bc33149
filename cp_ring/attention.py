"""ring_attention: the autograd function that executes a RingPlan.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of queries and keys,
e head size of values. Inside, tokens come first (sbhd): any token range of keys is then contiguous and travels uncopied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_ring.comm.slots import Slots
from cp_ring.comm.transport import Batch, Done, Pending, Transport, transport_for
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import PlanError
from cp_ring.kernels import AttentionKernel, Capabilities, choose, merge_
from cp_ring.observe.ledger import ledgers
from cp_ring.plan.lower import lower
from cp_ring.plan.ring_plan import Hop, RankPlan, RingPlan, Transfer
from cp_ring.plan.tiles import OPEN


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RingPlan,
    group: dist.ProcessGroup | None = None,
    *,
    softmax_scale: float | None = None,
    kernel: str = "auto",
    num_slots: int = 2,
    wire_dtype: str = "input",
    qkv_format: str = "bshd",
) -> Tensor:
    """Attention of a sequence that is sharded over `group` as `plan` says; differentiable.

    Every rank of `group` calls it with its own shard, `plan.layout.shard(x, rank, dim)` of the whole.

    q [b, s, h, d], k [b, s, g, d], v [b, s, g, e] ("sbhd": [s, b, ...]) to out [b, s, h, e]; g divides h, and only the
    g heads travel. Any floating-point dtype; accumulation is in float32 (float64 for float64). `softmax_scale` defaults
    to d ** -0.5. `wire_dtype` is the dtype in which partial gradients travel: "input" or "float32". `group` may be None
    where the plan has one rank.

    Raises `PlanError` when tensors, group and plan disagree, `KernelError` when the kernel cannot do the job.

    Ring attention: Liu et al., https://arxiv.org/abs/2310.01889.
    """
    ContextParallelConfig.make(num_slots=num_slots, wire_dtype=wire_dtype)
    if qkv_format not in ("bshd", "sbhd"):
        raise PlanError(f"qkv_format {qkv_format!r}: it is bshd or sbhd")
    if qkv_format == "bshd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    row = plan.row(_rank(plan, group))
    _check(q, k, v, row)
    run = _Run(
        row=row,
        transport=transport_for(group, q.device) if group is not None and plan.cp > 1 else None,
        kernel=choose(kernel, device=q.device, dtype=q.dtype, d=q.shape[-1], e=v.shape[-1]),
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        num_slots=num_slots,
        wire_dtype=q.dtype if wire_dtype == "input" else torch.promote_types(q.dtype, torch.float32),
        sums=torch.promote_types(q.dtype, torch.float32),
    )
    out: Tensor = _RingAttention.apply(q, k, v, run)
    return out.transpose(0, 1) if qkv_format == "bshd" else out


@dataclass(frozen=True)
class _Run:
    """What one call is made with. `sums` is the dtype of everything that is accumulated."""

    row: RankPlan
    transport: Transport | None
    kernel: AttentionKernel
    scale: float
    num_slots: int
    wire_dtype: torch.dtype
    sums: torch.dtype


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, run: _Run) -> Tensor:  # type: ignore[no-untyped-def]
        k, v = k.contiguous(), v.contiguous()
        out, lse = _forward(run, q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def, override]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(ctx.run, dout, q, k, v, out, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _forward(run: _Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The hop loop: while a hop's tiles are computed, the next hop's keys travel. Out [s, b, h, e], lse [b, h, s]."""
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=run.sums)
    lse = q.new_full((q.shape[1], q.shape[2], q.shape[0]), -math.inf, dtype=run.sums)
    for hop, k_hop, v_hop in _KeyStream(run, k, v):
        for step in _program(hop, run.kernel.capabilities):
            out_tile, lse_tile = step.forward(run, q, k_hop, v_hop)
            merge_(out[step.q].transpose(0, 1), lse[..., step.q], out_tile, lse_tile)
    return out, lse


def _backward(run: _Run, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """As forward; besides the next keys, the last hop's partial gradients travel to the owners of their keys."""
    dq = torch.zeros_like(q, dtype=run.sums, memory_format=torch.contiguous_format)
    keys, grads = _KeyStream(run, k, v, backward=True), _GradStream(run, k, v)
    for hop, k_hop, v_hop in keys:
        dk, dv = grads.start(hop)
        for step in _program(hop, run.kernel.capabilities):
            dq_tile, dk_tile, dv_tile = step.backward(run, dout, q, k_hop, v_hop, out, lse)
            dq[step.q] += dq_tile.transpose(0, 1)
            dk[step.grad] += dk_tile.transpose(0, 1)
            dv[step.grad] += dv_tile.transpose(0, 1)
        grads.send(hop)
    return dq, *grads.finish()


@dataclass(frozen=True)
class _Step:
    """One kernel call: rows of the shard, rows of the hop's key buffer and of its gradient buffer, and the band.

    `reverse` runs the tile with query and key order reversed, which turns an upper triangle into a causal one.
    """

    q: slice
    k: slice
    grad: slice
    lo: int
    hi: int
    reverse: bool

    def forward(self, run: _Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self._view(x, part) for x, part in ((q, self.q), (k, self.k), (v, self.k)))
        out, lse = run.kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=run.scale)
        return (out.flip(1), lse.flip(2)) if self.reverse else (out, lse)

    def backward(self, run: _Run, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        dout, q, out = (self._view(x, self.q) for x in (dout, q, out))
        k, v, lse = self._view(k, self.k), self._view(v, self.k), lse[..., self.q]
        lse = lse.flip(2) if self.reverse else lse
        grads = run.kernel.backward(dout, q, k, v, out, lse, lo=self.lo, hi=self.hi, scale=run.scale)
        return tuple(x.flip(1) for x in grads) if self.reverse else grads

    def _view(self, x: Tensor, rows: slice) -> Tensor:
        """[s, b, ...] to the tile's [b, rows, ...]."""
        x = x[rows].transpose(0, 1)
        return x.flip(1) if self.reverse else x


@lru_cache(maxsize=4096)
def _program(hop: Hop, capabilities: Capabilities) -> tuple[_Step, ...]:
    """A hop's tiles, lowered to what the kernel can do."""
    lowered = lower(hop.tiles, capabilities)
    steps = []
    for tile, parent, reverse in zip(lowered.tiles, lowered.parent.tolist(), lowered.reverse.tolist(), strict=True):
        slide, shift = tile.k0 - tile.q0, int(hop.grad_shift[parent])
        lo = tile.lo if tile.lo == -OPEN else tile.lo - slide
        hi = tile.hi if tile.hi == OPEN else tile.hi - slide
        if reverse:
            # Column - row changes sign and counts from the other corner; for the square tiles that are reversed, just the sign.
            lo, hi = -hi, -lo
        rows, columns = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        steps.append(_Step(rows, columns, slice(tile.k0 + shift, tile.k1 + shift), lo, hi, reverse))
    return tuple(steps)


class _KeyStream:
    """A rank's hops with their keys and values; each batch of messages is posted before the hop before it is computed."""

    def __init__(self, run: _Run, k: Tensor, v: Tensor, backward: bool = False):
        self._run, self._backward = run, backward
        self._slots = Slots(run.num_slots, run.row.max_keys, k, v)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {0: (k, v)}

    def __iter__(self) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        hops = self._run.row.hops
        pending = self._post(hops[0]) if hops else Done()
        for hop, after in zip(hops, (*hops[1:], None), strict=True):
            pending.wait()
            # Backward, batches of keys and gradients keep one order on all ranks: keys of hop t before gradients of hop t - 1.
            ahead = after is not None and (not self._backward or after.index == hop.index + 1)
            pending = self._post(after) if after is not None and ahead else Done()
            for ledger in ledgers():
                ledger.hops += bool(len(hop.tiles))
            yield hop, *self._buffers.get(hop.index, self._buffers[0])
            if hop.index in self._buffers and hop.index:
                self._slots.give(self._buffers.pop(hop.index))
            if after is not None and not ahead:
                pending = self._post(after)

    def _post(self, hop: Hop) -> Pending:
        if self._run.transport is None:
            return Done()
        if hop.receive:
            self._buffers[hop.index] = self._slots.take(hop.num_keys)
        receives = [(hop.receive, self._buffers[hop.index])] if hop.receive else []
        return self._run.transport.post(Batch([(send, self._buffers[send.buffer]) for send in hop.sends], receives, "keys"))


class _GradStream:
    """Gradients of keys and values: summed per hop, sent on, and added where they belong.

    A hop's messages travel while the next hop is computed and are through before that hop's own leave, so one buffer
    each for the sum, what leaves and what arrives serves any number of ranks.
    """

    def __init__(self, run: _Run, k: Tensor, v: Tensor):
        self._run = run
        self._home = tuple(torch.zeros_like(x, dtype=run.sums) for x in (k, v))
        row = run.row
        self._sum, self._out, self._in = (
            tuple(x.new_empty((rows, *x.shape[1:]), dtype=dtype) for x in (k, v))
            for rows, dtype in (
                (row.max_grads, run.sums),
                (row.max_grads, run.wire_dtype),
                (row.max_grad_receives, run.wire_dtype),
            )
        )
        self._pending: Pending = Done()
        self._arriving: list[tuple[Transfer, Transfer]] = []
        self._now: tuple[int, tuple[Tensor, ...]] = (0, self._home)

    def start(self, hop: Hop) -> tuple[Tensor, ...]:
        """The hop's gradient buffers, zeroed: [num_grads, b, g, d] and [num_grads, b, g, e]; hop 0 sums at home."""
        sums = tuple(x[: hop.num_grads].zero_() for x in self._sum) if hop.index else self._home
        self._now = (hop.index, sums)
        return sums

    def send(self, hop: Hop) -> None:
        """Adds what came since the last hop, then posts this hop's own messages."""
        self._collect()
        if self._run.transport is None:
            return
        leaving = tuple(x[: hop.num_grads] for x in self._out)
        if hop.grad_sends:
            for source, target in zip(self._now[1], leaving, strict=True):
                target.copy_(source)
        start = 0
        for transfer in hop.grad_receives:
            self._arriving.append((transfer, transfer.packed(start)))
            start += transfer.tokens
        receives = [(packed, self._in) for _, packed in self._arriving]
        self._pending = self._run.transport.post(Batch([(t, leaving) for t in hop.grad_sends], receives, "gradients"))

    def finish(self) -> tuple[Tensor, ...]:
        """The gradients of the rank's own keys and values, with everything that came from afar."""
        self._collect()
        return self._home

    def _collect(self) -> None:
        self._pending.wait()
        for transfer, packed in self._arriving:
            assert transfer.buffer in (0, self._now[0]), "gradients arrived for a hop that is not the present one"
            for target, arrived in zip(self._now[1] if transfer.buffer else self._home, self._in, strict=True):
                for (first, last), (start, end) in zip(transfer.ranges, packed.ranges, strict=True):
                    target[first:last] += arrived[start:end]
        self._arriving = []


def _rank(plan: RingPlan, group: dist.ProcessGroup | None) -> int:
    if group is None:
        if plan.cp > 1:
            raise PlanError(f"the plan is for {plan.cp} ranks: pass their process group")
        return 0
    if dist.get_world_size(group) != plan.cp:
        raise PlanError(f"the plan is for {plan.cp} ranks, the group has {dist.get_world_size(group)}")
    return dist.get_rank(group)


def _check(q: Tensor, k: Tensor, v: Tensor, row: RankPlan) -> None:
    """q, k, v are tokens first."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} (tokens first)"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise PlanError(f"q, k and v have 4 dimensions, tokens, batch, heads and head size; here {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise PlanError(f"q, k and v share one floating-point dtype; here {q.dtype}, {k.dtype}, {v.dtype}")
    if any(x.shape[0] != row.num_rows for x in (q, k, v)):
        raise PlanError(f"rank {row.rank} holds {row.num_rows} tokens of the layout; here {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise PlanError(f"batch sizes agree, q and k share a head size, key/value heads divide query heads; here {shapes}")
