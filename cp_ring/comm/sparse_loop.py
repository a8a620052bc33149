"""The hop loops of sparse attention, in which each query attends to the keys that an indexer scores
highest (DeepSeek-V3.2-Exp, section 2.1, https://github.com/deepseek-ai/DeepSeek-V3.2-Exp).

Two passes over the hops in forward, one in backward, with the streams of `hop_loop`:

1. `select`: keys of the indexer arrive, with the position of each, and each query keeps the `topk`
   best of them so far. Of equal scores the earlier position wins, whatever the number of ranks.
2. Latents arrive, and each query attends to those that it has selected.
3. In backward latents arrive again, with the indexer's keys if it has a loss, and their gradients
   go home. What arrives in a recomputation is held for its backward, which follows at once.

Every tile of the plan is scored once, so the proof of the plan is that of the selection. Nothing of
other ranks is kept but the number of each selected key, in the order in which keys arrive.

Shapes: s tokens of this rank, b batch, h query heads, d size of a latent with the rotated part, of
which the first c are the value; i heads of the indexer of size e; u keys of a hop, w keys of a
block, t queries of a block, n batch rows of a product: b where queries share the keys, else b * t.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_ring.comm.agreement import Fact
from cp_ring.comm.sparse_blocks import (
    NONE,
    Block,
    Selection,
    chosen,
    of_keys,
    of_queries,
    ordered,
    products,
    read,
    seen,
)
from cp_ring.comm.streams import GradStream, KeyStream
from cp_ring.comm.transport import Transport
from cp_ring.observe.spans import span
from cp_ring.observe.timing import timed
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.ops.dtypes import on_device, sum_dtype, without_autocast
from cp_ring.ops.segments import Segments
from cp_ring.plan.tables import Hop, RankPlan
from cp_ring.plan.updates import Partial, gradient_updates
from cp_ring.runtime import RUNTIME

_LEAST = 1e-10  # Megatron's, of a probability in a logarithm

_made: weakref.WeakKeyDictionary[RankPlan, Mapping[int, Sequence[Segments]]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, eq=False)
class IndexerLoss:
    """coeff * KL(attention of all heads || softmax of the indexer's scores), summed over queries.

    whole: over all keys that a query sees, not over those selected alone.
    heads: query heads of all tensor-parallel ranks. over_heads: adds up a tensor of these ranks in
    place, or takes the largest of their integers.
    counted: queries that count, bool [b, s]; None for all.
    record: takes the loss of this rank's queries, once backward has computed it.
    """

    coeff: float
    whole: bool
    heads: int
    over_heads: Callable[[Tensor], object]
    counted: Tensor | None
    record: Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class SparseCall:
    """What the passes of one call share. value_size: c. relu: of the indexer's scores, by head.
    hold: what arrives is held for backward.
    """

    rank_plan: RankPlan
    transport: Transport | None
    place: Place
    rank: int
    topk: int
    scale: float
    value_size: int
    relu: bool
    num_slots: int
    wire_dtype: torch.dtype
    hold: bool
    loss: IndexerLoss | None

    @property
    def hops(self) -> Sequence[Hop]:
        return self.rank_plan.hops

    def keys(self, own: tuple[Tensor, ...], backward: bool = False) -> KeyStream:
        """The hops, with the tensors of their keys."""
        plan = self.rank_plan
        return KeyStream(plan, self.hops, self.transport, own, self.num_slots, backward)

    def again(
        self, own: tuple[Tensor, ...], held: Sequence[dict[int, Tensor] | None]
    ) -> Iterator[tuple[Any, ...]]:
        """The same in backward, of what is held where the call holds it."""
        if not self.hold:
            yield from self.keys(own, backward=True)
            return
        kept = [each or {} for each in held[: len(own)]]
        for hop in self.hops:
            yield hop, *(each.get(hop.index, x) for each, x in zip(kept, own, strict=True))

    def updates(self) -> Mapping[int, Sequence[Segments]]:
        """Those of the sums of keys' gradients: one part for each hop, in the order of its keys."""
        if self.rank_plan not in _made:
            parts = [
                [Partial(tiles.k0 + hop.grad_shift, tiles.k1 + hop.grad_shift, tiles.k0)]
                if len(tiles := hop.tiles)
                else []
                for hop in self.hops
            ]
            of_hops = gradient_updates(self.hops, parts, self.rank_plan.num_keys)
            _made[self.rank_plan] = {
                index: tuple(Segments(each.segments, each.whole) for each in of_hop)
                for index, of_hop in of_hops.items()
            }
        return _made[self.rank_plan]

    def agree(self, *sizes: object) -> None:
        """Raises `PlanError` on all ranks where they make different calls."""
        named = {"topk": self.topk, "scale": self.scale, "sizes": sizes, "loss": bool(self.loss)}
        if (agree := getattr(self.transport, "agree", None)) is not None:
            agree(
                (self.rank_plan.digest, *named.items()),
                lambda: [
                    *(Fact(*part) for part in self.rank_plan.identity),
                    *(Fact.of(f"sparse {name}", value) for name, value in named.items()),
                ],
            )


def _index_scores(call: SparseCall, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[b, t, w] of q [b, t, i, e], weights [b, t, i] and keys [n, w, e]."""
    scores = products(q, keys)
    return ((scores.relu() if call.relu else scores) * weights[..., None]).sum(2)


@torch.no_grad()
def select(call: SparseCall, q: Tensor, weights: Tensor, k: Tensor, positions: Tensor) -> Selection:
    """The keys of each query: q [s, b, i, e], weights [s, b, i], k [s, b, e] of the indexer, and
    positions [s] of this rank's tokens, int64.
    """
    call.agree("indexer", q.dtype, *q.shape)
    dtype, device, n = sum_dtype(q.dtype), q.device, call.rank_plan.cp * len(k)
    whole = call.loss is not None and call.loss.whole
    q, weights = (x.transpose(0, 1).to(dtype) for x in (q, weights))
    (b, s, heads, _), most = q.shape, min(call.topk, n)
    best = torch.full((b, s, most), NONE, device=device)
    lse = q.new_full((b, s), -math.inf)
    first, number = dict[int, int](), torch.zeros(n, dtype=torch.int64, device=device)
    held: dict[int, Tensor] | None = {} if call.hold and call.loss is not None else None
    total = 0
    WATCH.place, WATCH.backward = call.place, False
    with on_device(q), timed(call.rank, call.place, "forward", device):
        for hop, keys, where in call.keys((k.contiguous(), positions.int())):
            if held is not None and hop.receives:
                held[hop.index] = keys.clone()
            first[hop.index], where = total, where[: hop.num_keys]  # own keys, if it has none
            number[where.long()] = torch.arange(total, total + len(where), device=device)
            total += len(where)
            with span("select", hop):
                for block in seen(hop, b * heads, device):
                    mine = block.mine
                    scores_of_block = _index_scores(
                        call, q[:, mine], weights[:, mine], block.take(keys, dtype)
                    )
                    as_keys = ordered(scores_of_block, where[block.at].long()).where(
                        block.allowed, NONE
                    )
                    best[:, mine] = torch.cat([best[:, mine], as_keys], -1).topk(most).values
                    if whole:
                        scores_of_block = scores_of_block.masked_fill(~block.allowed, -math.inf)
                        lse[:, mine] = lse[:, mine].logaddexp(scores_of_block.logsumexp(-1))
    scores, place = read(best)
    numbers = number[place.clamp(0, n - 1)].masked_fill(best == NONE, total).sort(-1).values
    edges = torch.tensor([*first.values(), total], device=device).expand(b, s, -1)
    widths = torch.searchsorted(numbers, edges.contiguous()).diff(dim=-1).amax((0, 1))
    if call.loss is not None:
        call.loss.over_heads(widths)
    return Selection(
        numbers.int(),
        first,
        dict(zip(first, widths.tolist(), strict=True)),
        lse if whole else scores.to(dtype).logsumexp(-1),
        held,
    )


class SparseAttention(torch.autograd.Function):
    """From q [s, b, h, d] and latents [s, b, d] to out [s, b, h, c] in the dtype of q, and the
    place of the indexer's loss in the graph, a zero. With a loss, q, weights and k of the indexer
    are those of `select`; else None.

    Backward computes the loss: its gradients are those of `dloss`.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, call: SparseCall, selection: Selection, q: Tensor, latents: Tensor,
        *indexer: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call.agree("attention", q.dtype, *q.shape)
        WATCH.place, WATCH.backward = call.place, False
        with (
            without_autocast(q.device),
            on_device(q),
            timed(call.rank, call.place, "forward", q.device),
        ):
            held = dict[int, Tensor]()
            out, lse, whole = _attend(call, selection, q, latents.contiguous(), held)
        out = out.transpose(0, 1).to(q.dtype)
        ctx.save_for_backward(q, latents, out, lse, whole, *selection[::3], *indexer)
        ctx.call, ctx.selection, ctx.held = call, selection[1:3], (held, selection.held)
        return out, q.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, latents, out, lse, whole, numbers, of_indexer, *indexer = ctx.saved_tensors
        call: SparseCall = ctx.call
        first, widths = ctx.selection
        selection = Selection(numbers, first, widths, of_indexer)
        WATCH.place, WATCH.backward = call.place, True
        with (
            without_autocast(q.device),
            on_device(q),
            timed(call.rank, call.place, "backward", q.device),
        ):
            passed = _Backward(call, selection, (q, out, dout), (lse, whole), indexer, dloss)
            return None, None, *passed.run(latents.contiguous(), ctx.held)


def _attend(
    call: SparseCall, selection: Selection, q: Tensor, latents: Tensor, held: dict[int, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Out [b, s, h, c] and lse [b, s, h] over the selected keys, and lse over all keys where the
    loss wants it. `held` gets the latents that have arrived, where the call holds them.
    """
    dtype, (s, b, h, d) = sum_dtype(q.dtype), q.shape
    q = q.transpose(0, 1).to(dtype)
    out, lse = q.new_zeros(b, s, h, call.value_size), q.new_full((b, s, h), -math.inf)
    whole = lse.clone() if call.loss is not None and call.loss.whole else None
    for hop, keys in call.keys((latents,)):
        if call.hold and hop.receives:
            held[hop.index] = keys.clone()
        with span("forward", hop):
            for block in chosen(selection, hop, max(h, d)):
                mine, k = block.mine, block.take(keys, dtype)
                scores = _attention_scores(call, q[:, mine], k, block)
                before = lse[:, mine]
                after = before.logaddexp(scores.logsumexp(-1))
                out[:, mine] *= _weights(before, after)[..., None]
                weights = _weights(scores, after[..., None])
                out[:, mine] += of_queries(weights, k[..., : call.value_size])
                lse[:, mine] = after
            if whole is not None:
                for block in seen(hop, b * h, q.device):
                    mine = block.mine
                    scores = _attention_scores(call, q[:, mine], block.take(keys, dtype), block)
                    whole[:, mine] = whole[:, mine].logaddexp(scores.logsumexp(-1))
    return out, lse, whole


def _attention_scores(call: SparseCall, q: Tensor, k: Tensor, block: Block) -> Tensor:
    scores = products(q, k) * call.scale
    return scores.masked_fill_(~block.allowed[:, :, None], -math.inf)


def _weights(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), and 0 where part is -inf."""
    return (part - whole).exp().masked_fill(part == -math.inf, 0.0)


class _Backward:
    """The pass of backward, and the gradients of this rank's queries."""

    def __init__(
        self, call: SparseCall, selection: Selection,
        attention: tuple[Tensor, Tensor, Tensor], lse: tuple[Tensor, Tensor | None],
        indexer: Sequence[Tensor], dloss: Tensor,
    ):  # fmt: skip
        self._call, self._selection, self._inputs = call, selection, indexer
        dtype = self._dtype = sum_dtype(attention[0].dtype)
        self._q, out, self._dout = (x.transpose(0, 1).to(dtype) for x in attention)
        self._delta = (self._dout * out).sum(-1)
        self._lse, self._whole = lse
        self._dq, self._like = torch.zeros_like(self._q), attention[0]
        if call.loss is not None:
            self._qi, self._weights = (x.transpose(0, 1).to(dtype) for x in indexer[:2])
            self._dqi, self._dweights = map(torch.zeros_like, (self._qi, self._weights))
            self._scale, self._kl = dloss * call.loss.coeff, dloss.new_zeros((), dtype=dtype)

    def run(
        self, latents: Tensor, held: Sequence[dict[int, Tensor] | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, latents, and q, weights and k of the indexer."""
        call, loss, (b, _, h, d) = self._call, self._call.loss, self._q.shape
        own = (latents,) if loss is None else (latents, self._inputs[2].contiguous())
        home = tuple(x[:, :, None] for x in own)
        grads = GradStream(call.rank_plan, call.updates(), call.transport, home, call.wire_dtype)
        size = max(h, d, 0 if loss is None else self._qi.shape[2])
        for hop, *keys in call.again(own, held):
            grads.start(hop)
            if len(hop.tiles):
                sums = [torch.zeros_like(x, dtype=self._dtype) for x in keys]
                with span("backward", hop):
                    for block in chosen(self._selection, hop, size):
                        self._attended(block, keys, sums)
                    if loss is not None and loss.whole:
                        for block in seen(hop, b * size, latents.device):
                            taken = [block.take(x, self._dtype) for x in keys]
                            self._taught(block, self._scores(block, taken[0]), taken[1], sums[1])
                grads.add(*(x[:, :, None] for x in sums))
            grads.send(hop)
        dlatents, *dk = (x[:, :, 0] for x in grads.finish())
        dq = self._dq.transpose(0, 1).to(self._like.dtype)
        if loss is None:
            return dq, dlatents, None, None, None
        loss.record(self._kl * loss.coeff)
        both = zip((self._dqi, self._dweights), self._inputs, strict=False)
        return dq, dlatents, *(x.transpose(0, 1).to(like.dtype) for x, like in both), *dk

    def _scores(self, block: Block, k: Tensor) -> Tensor:
        return _attention_scores(self._call, self._q[:, block.mine], k, block)

    def _attended(self, block: Block, keys: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Adds the gradients of the selected pairs of a block, and those of the loss over them."""
        mine, loss, c = block.mine, self._call.loss, self._call.value_size
        k, dout = block.take(keys[0], self._dtype), self._dout[:, mine]
        scores = self._scores(block, k)
        weights = _weights(scores, self._lse[:, mine, :, None])
        dscores = weights * (products(dout, k[..., :c]) - self._delta[:, mine, :, None])
        dscores *= self._call.scale
        self._dq[:, mine] += of_queries(dscores, k)
        dk = of_keys(dscores, self._q[:, mine], len(k))
        dk[..., :c] += of_keys(weights, dout, len(k))
        block.give(sums[0], dk)
        if loss is not None and not loss.whole:
            self._taught(block, scores, block.take(keys[1], self._dtype), sums[1])

    def _taught(self, block: Block, scores: Tensor, k: Tensor, dk: Tensor) -> None:
        """Adds the loss of a block of attention's scores [b, t, h, w] and keys [n, w, e] of the
        indexer, and its gradients.
        """
        mine, call, loss = block.mine, self._call, self._call.loss
        assert loss is not None
        lse = self._lse if self._whole is None else self._whole
        target = _weights(scores, lse[:, mine, :, None]).sum(2)
        loss.over_heads(target)
        target /= loss.heads
        q, weights = self._qi[:, mine], self._weights[:, mine, :, None]
        raw = products(q, k)
        acts = raw.relu() if call.relu else raw
        log = (acts * weights).sum(2) - self._selection.lse[:, mine, None]
        counts = block.allowed
        if loss.counted is not None:
            counts = counts & loss.counted[:, mine, None]
        gap = (target.clamp_min(_LEAST).log() - log) * target
        self._kl += gap.masked_fill(~counts, 0.0).sum()
        dscores = ((log.exp() - target) * self._scale).masked_fill(~counts, 0.0)[:, :, None]
        self._dweights[:, mine] += (dscores * acts).sum(-1)
        dscores = dscores * weights
        dscores = dscores * (raw > 0) if call.relu else dscores
        self._dqi[:, mine] += of_queries(dscores, k)
        block.give(dk, of_keys(dscores, q, len(k)))
