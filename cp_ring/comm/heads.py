"""Exchanges tokens for heads among the ranks of a member of the ring (an all-to-all), and heads for
tokens on the way back.

Shapes: s tokens of this rank, S tokens of the member, u ranks of the member, b batch, h query heads
of the layer, g key/value
heads, d and e head sizes of keys and values, i query heads of this rank, j key/value heads of this
rank.

Attention over heads is built around attention over the ring, which does not know of it:

    q [s, b, h, d], k [s, b, g, d], v [s, b, g, e]      this rank's tokens, all heads
      -> q [S, b, i, d], k [S, b, j, d], v [S, b, j, e]   the member's tokens, this rank's heads
      -> attention over the ring of the members: out [S, b, i, e]
      -> out [s, b, h, e]

The heads of a rank are cut into groups (`HeadSplit`). The messages of a group are posted before the
group before it is computed, and its outputs travel while the next one is computed; in backward
likewise. Autograd runs nodes in the opposite order of their making, on every rank, so the order in
which forward makes the nodes gives backward the same overlap: see `over_heads`.

What is kept for backward: q, k, v and out with this rank's heads of the member's tokens, which are
as large as those of all heads of this rank's tokens, so nothing travels twice. Where ranks share
key/value heads, keys of the member's tokens would be larger than this rank's own: then the own ones
are kept, and travel again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from cp_ring.comm.transport import MessageBatch, Pending, Transport
from cp_ring.observe.spans import waiting
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.sizes.head_split import HeadSplit
from cp_ring.plan.tables import Exchange, Transfer
from cp_ring.runtime import RUNTIME

MAX_RANGES = 4
"""A shard that is at most so many ranges of the member's is received where it belongs; another is
received as one, and copied.
"""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""Attention over the ring of one group of heads: from (q, k, v, sink, group) to out [S, b, heads,
e] and lse [b, heads, S].
"""


class SubTransport:
    """Some ranks of a transport as a transport of their own: rank i of it is `ranks[i]` of the
    whole.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]):
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)

    def post(self, batch: MessageBatch) -> Pending:
        """Follows `Transport.post`."""
        sends, receives = (
            [
                (replace(transfer, peer=self._ranks[transfer.peer]), buffers)
                for transfer, buffers in transfers
            ]
            for transfers in (batch.sends, batch.receives)
        )
        return self._whole.post(MessageBatch(sends, receives, batch.kind, batch.hop))


def sub_transports(whole: Transport, heads: int) -> tuple[Transport, Transport | None]:
    """The neighbors of a rank, with which it exchanges heads, and the ranks of its ring, None if it
    has no other member.

    They share the connections of the whole. Two ranks are never both neighbors and in one ring, so
    no message is mistaken. Groups of their own would have communicators of their own, of which
    several are in flight at a time; NCCL promises progress for one
    (https://github.com/NVIDIA/nccl/issues/783).
    """
    first, place = whole.rank - whole.rank % heads, whole.rank % heads
    ring = SubTransport(whole, range(place, whole.size, heads)) if heads < whole.size else None
    return SubTransport(whole, range(first, first + heads)), ring


class HeadExchange:
    """The exchange of one call: a member's `transport`, the plan's `exchange` of tokens, and the
    split of the heads.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange,
        split: HeadSplit,
    ):
        self.transport, self.split, self.place = transport, split, exchange.place
        self._peers = [peer for peer in range(transport.size) if peer != self.place]
        self._side = _Side(exchange)

    def gather_tokens(self, parts: Sequence[Sequence[Tensor]]) -> Flight:
        """Sends `parts[x][p]` [s, b, heads of p, size] of each tensor x to rank p; arrives as [S,
        b, own heads, size].
        """
        side, mine = self._side, [each[self.place] for each in parts]
        new = [x.new_empty((side.total, *x.shape[1:])) for x in mine]
        sends = [(Transfer(p, side.own[self.place]), [x[p] for x in parts]) for p in self._peers]
        receives = [(Transfer(p, side.ranges[p]), new) for p in self._peers]
        for (start, end), (first, last) in side.at(self.place):
            for x, target in zip(mine, new, strict=True):
                target[first:last].copy_(x[start:end])
        pending = self.transport.post(MessageBatch(sends, receives, "heads"))
        return Flight(pending, lambda: [side.in_order(x) for x in new])

    def gather_heads(self, tensors: Sequence[Tensor], heads: Sequence[Sequence[int]]) -> Flight:
        """Sends the tokens of rank p of each tensor x [S, b, own heads, size] to p.

        What arrives are lists over the ranks p of tensors [s, b, heads[x][p], size]; one list for
        each tensor.
        """
        side = self._side
        leaving = [side.end_to_end(x.contiguous()) for x in tensors]
        held = side.tokens[self.place]
        new = [
            [x.new_empty((held, x.shape[1], count, x.shape[3])) for count in counts]
            for x, counts in zip(leaving, heads, strict=True)
        ]
        sends = [(Transfer(p, side.ranges[p]), leaving) for p in self._peers]
        receives = [
            (Transfer(p, side.own[self.place]), [each[p] for each in new]) for p in self._peers
        ]
        for (start, end), (first, last) in side.at(self.place):
            for x, targets in zip(leaving, new, strict=True):
                targets[self.place][start:end].copy_(x[first:last])
        pending = self.transport.post(MessageBatch(sends, receives, "heads"))
        return Flight(pending, lambda: new)


class _Side:
    """An exchange of tokens: in which order shards lie, where they belong or end to end."""

    def __init__(self, exchange: Exchange):
        self.tokens, self._exchange = exchange.tokens, exchange
        self.total = sum(self.tokens)
        self._direct = max(map(len, exchange.ranges)) <= MAX_RANGES
        ends = accumulate(self.tokens)
        self.ranges = (
            exchange.ranges
            if self._direct
            else tuple(((end - size, end),) for end, size in zip(ends, self.tokens, strict=True))
        )
        self.own = [Transfer(0, ranges).packed().ranges for ranges in self.ranges]
        """Each rank's own shard, cut as its ranges are."""

    def at(self, place: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The ranges of a rank's own shard, and where they lie in that of the member."""
        return zip(self.own[place], self.ranges[place], strict=True)

    def end_to_end(self, x: Tensor) -> Tensor:
        """From the order of the member's shard to that of `ranges`."""
        return x if self._direct else x.index_select(0, _index(self._exchange, x.device))

    def in_order(self, x: Tensor) -> Tensor:
        """The inverse of `end_to_end`."""
        if self._direct:
            return x
        in_order = torch.empty_like(x)
        in_order[_index(self._exchange, x.device)] = x
        return in_order


@RUNTIME.cache(maxsize=16)
def _index(exchange: Exchange, device: torch.device) -> Tensor:
    """The places in the member's shard of the tokens of its ranks, shard after shard, int64 [S]."""
    places = [torch.arange(start, end) for spans in exchange.ranges for start, end in spans]
    return torch.cat(places).to(device)


class Flight:
    """Messages of an exchange on their way; `land` waits for them and returns what arrived."""

    def __init__(self, pending: Pending, arrived: Callable[[], Any]):
        self._pending, self._arrived = pending, arrived

    def land(self) -> Any:
        with record_function("cp_ring: exchange heads"), waiting():
            self._pending.wait()
        return self._arrived()


@dataclass
class _Trip:
    """An exchange of tensors in forward, and of their gradients, the other way, in backward."""

    depart: Callable[..., Flight]
    arrive: Callable[[Any], tuple[Tensor, ...]]
    depart_back: Callable[..., Flight]
    arrive_back: Callable[[Any], tuple[Tensor, ...]]
    flight: Flight | None = None

    def land(self) -> Any:
        flight, self.flight = self.flight, None
        assert flight is not None, "an exchange ends that has not begun"
        return flight.land()


class _Depart(torch.autograd.Function):
    """Forward posts a trip's messages; backward ends the trip of the gradients. Its result only
    links it to `_Arrive`.
    """

    @staticmethod
    def forward(ctx, trip: _Trip, *tensors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.trip = trip
        trip.flight = trip.depart(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        return None, *ctx.trip.arrive_back(ctx.trip.land())


class _Arrive(torch.autograd.Function):
    """Forward ends a trip; backward posts the messages of the gradients."""

    @staticmethod
    def forward(ctx, trip: _Trip, link: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        ctx.trip = trip
        return trip.arrive(trip.land())

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        ctx.trip.flight = ctx.trip.depart_back(*gradients)
        return None, gradients[0].new_zeros(0)


class _Repeat(torch.autograd.Function):
    """The heads `heads` of x [S, b, j, d], some of them more than once; their gradients are added
    in float32.
    """

    @staticmethod
    def forward(ctx, x: Tensor, heads: tuple[int, ...]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.heads, ctx.count = heads, x.shape[2]
        return _repeated(x, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        total = gradient.new_zeros(
            (*gradient.shape[:2], ctx.count, gradient.shape[3]), dtype=sum_dtype(gradient.dtype)
        )
        for place, head in enumerate(ctx.heads):
            total[:, :, head] += gradient[:, :, place]
        return total.to(gradient.dtype), None


def over_heads(
    exchange: HeadExchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    attention: Attention,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention with `attention` over the ring and `exchange` around it; differentiable.

    Args:
        q: [s, b, h, d]; k: [s, b, g, d]; v: [s, b, g, e].
        sink: [h], or None.
        attention: the ring's.
        with_lse: whether lse is exchanged too.

    Returns:
        out [s, b, h, e], and lse [b, h, s] or None.

    Nodes are made in this order for two groups, so that backward, which runs the other way,
    overlaps as forward does:

        keys 0 depart, keys 1 depart, keys 0 arrive, compute 0, out 0 departs, keys 1 arrive,
        compute 1, out 1 departs, out 0 arrives, out 1 arrives
    """
    split, place = exchange.split, exchange.place
    queries = _cut(q, split.groups, split.size)
    keys, values = (_cut(x, split.groups, split.size) if split.even else [x] for x in (k, v))
    outs: list[tuple[_Trip, Tensor]] = []
    inputs = [
        _keys_trip(exchange, group, queries[group], keys[group], values[group])
        for group in range(split.groups)
    ]
    links = [
        _Depart.apply(trip, queries[group], keys[group], values[group])
        for group, trip in enumerate(inputs[:1])
    ]
    for group, trip in enumerate(inputs):
        if group + 1 < split.groups:
            links.append(
                _Depart.apply(
                    inputs[group + 1], queries[group + 1], keys[group + 1], values[group + 1]
                )
            )
        own_q, own_k, own_v = _Arrive.apply(trip, links[group])
        first, last = split.queries[group][place]
        repeated = split.repeated[group][place]
        if repeated != tuple(range(own_k.shape[2])):
            own_k, own_v = (_Repeat.apply(x, repeated) for x in (own_k, own_v))
        with nullcontext() if split.even else _OwnKeysKept(exchange, k, v, own_k, own_v):
            out, lse = attention(
                own_q, own_k, own_v, None if sink is None else sink[first:last], group
            )
        leaving = (out, lse.permute(2, 0, 1)[..., None]) if with_lse else (out,)
        back = _outs_trip(exchange, out.shape[2])
        outs.append((back, _Depart.apply(back, *leaving)))
    arrived = zip(*(_Arrive.apply(trip, link) for trip, link in outs), strict=True)
    whole, *lses = (torch.stack(of_groups, 3).flatten(2, 4) for of_groups in arrived)
    return whole, lses[0][..., 0].permute(1, 2, 0) if lses else None


def _cut(x: Tensor, groups: int, size: int) -> Sequence[Tensor]:
    """The groups of heads of x [s, b, h, d], each [s, b, u, heads of the group of a rank, d]."""
    return x.unflatten(2, (size, groups, -1)).unbind(3)


def _by_rank(x: Tensor) -> Sequence[Tensor]:
    """The parts [s, b, heads, d] of x [s, b, u, heads, d] that go to each rank."""
    return x.movedim(2, 0).contiguous().unbind(0)


def _keys_trip(exchange: HeadExchange, group: int, q: Tensor, k: Tensor, v: Tensor) -> _Trip:
    """The trip of a group's q, k and v. Where ranks share key/value heads, k and v are [s, b, g,
    size], all heads.
    """
    split, shapes = exchange.split, [x.shape for x in (q, k, v)]

    def of_ranks(x: Tensor) -> Sequence[Tensor]:
        if x.dim() == 5:
            return _by_rank(x)
        return [x[:, :, first:last].contiguous() for first, last in split.keys[group]]

    def arrive_back(arrived: list[list[Tensor]]) -> tuple[Tensor, ...]:
        return tuple(
            torch.stack(parts, 2) if len(shape) == 5 else _add_up(parts, shape, split.keys[group])
            for parts, shape in zip(arrived, shapes, strict=True)
        )

    query_counts = [last - first for first, last in split.queries[group]]
    key_counts = [last - first for first, last in split.keys[group]]
    return _Trip(
        lambda *tensors: exchange.gather_tokens([of_ranks(x) for x in tensors]),
        tuple,
        lambda *gradients: exchange.gather_heads(gradients, [query_counts, key_counts, key_counts]),
        arrive_back,
    )


def _outs_trip(exchange: HeadExchange, heads: int) -> _Trip:
    """The trip of a group's out [S, b, heads, e], which arrives as [s, b, u, heads, e], and of its
    lse, for which e is 1.
    """
    counts = [heads] * exchange.split.size
    return _Trip(
        lambda *leaving: exchange.gather_heads(leaving, [counts] * len(leaving)),
        lambda arrived: tuple(torch.stack(parts, 2) for parts in arrived),
        lambda *gradients: exchange.gather_tokens([_by_rank(x) for x in gradients]),
        tuple,
    )


def _add_up(
    parts: Sequence[Tensor], shape: Sequence[int], heads: Sequence[tuple[int, int]]
) -> Tensor:
    """The sum, in float32, of the gradients of key/value heads `heads[p]` from each rank p, as
    `shape` [s, b, g, d].
    """
    total = parts[0].new_zeros(tuple(shape), dtype=sum_dtype(parts[0].dtype))
    for part, (first, last) in zip(parts, heads, strict=True):
        total[:, :, first:last] += part
    return total.to(parts[0].dtype)


def _repeated(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    return torch.stack([x[:, :, head] for head in heads], 2)


class _OwnKeysKept(torch.autograd.graph.saved_tensors_hooks):
    """Within it, autograd keeps this rank's own k and v instead of the larger keys and values of
    the member's tokens.

    Backward exchanges them again when it first asks for either.
    """

    def __init__(self, exchange: HeadExchange, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor):
        place, split = exchange.place, exchange.split
        # Contiguous, because a view would keep the tensor that it is a part of.
        kept = [x.detach().contiguous() for x in (k, v)]
        pointers = (_storage(own_k), _storage(own_v))
        again: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Any:
            return pointers.index(_storage(x)) if _storage(x) in pointers else x

        def unpack(x: Any) -> Tensor:
            if isinstance(x, Tensor):
                return x
            if x not in again:
                parts = [
                    [each[:, :, first:last].contiguous() for first, last in split.keys[0]]
                    for each in kept
                ]
                repeated = split.repeated[0][place]
                for which, each in enumerate(exchange.gather_tokens(parts).land()):
                    again[which] = (
                        each
                        if repeated == tuple(range(each.shape[2]))
                        else _repeated(each, repeated)
                    )
            return again.pop(x)

        super().__init__(pack, unpack)


def _storage(x: Tensor) -> tuple[int, torch.Size]:
    return x.data_ptr(), x.shape
