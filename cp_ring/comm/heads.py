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
previous group is computed, and its outputs travel while the next group is computed; in backward
likewise. Autograd runs nodes in the opposite order of their making, on every rank, so the order in
which forward makes the nodes gives backward the same overlap: see `over_heads`.

If ranks share a key/value head, each of them gets it, and its gradients are added in float32.
Backward keeps q, k, v and out with this rank's heads of the member's tokens. Nothing travels twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cp_ring.comm.flight import Flight, Landing
from cp_ring.comm.mover import Mover
from cp_ring.comm.transport import MessageBatch, Pending, Transport
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.records import Transfer
from cp_ring.plan.sizes.head_split import HeadSplit

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""Attention over the ring for one group of heads: from (q, k, v, sink, group) to out [S, b, heads,
e] and lse [b, heads, S].
"""


class SubTransport:
    """A transport over some ranks of another one: its rank i is `ranks[i]` of the whole."""

    def __init__(self, whole: Transport, ranks: Sequence[int]):
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)
        self.blocks = getattr(whole, "blocks", True)

    def post(self, batch: MessageBatch) -> Pending:
        sends, receives = (
            [
                (Transfer(self._ranks[t.peer], t.ranges, t.buffer), buffers)
                for t, buffers in transfers
            ]
            for transfers in (batch.sends, batch.receives)
        )
        return self._whole.post(replace(batch, sends=sends, receives=receives))


def sub_transports(whole: Transport, heads: int) -> tuple[Transport, Transport | None]:
    """Return the transport among the neighbors of a rank, with which it exchanges heads, and that
    of the ranks of its ring, None if the ring has one member.

    They share the connections of the whole. Two ranks are never both neighbors and in one ring, so
    no message is mistaken. Groups of their own would have communicators of their own, of which
    several are in flight at a time; NCCL promises progress for one
    (https://github.com/NVIDIA/nccl/issues/783).
    """
    first, place = whole.rank - whole.rank % heads, whole.rank % heads
    ring = SubTransport(whole, range(place, whole.size, heads)) if heads < whole.size else None
    return SubTransport(whole, range(first, first + heads)), ring


def over_heads(
    mover: Mover,
    split: HeadSplit,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    attention: Attention,
    with_lse: bool,
    start_backward: Callable[[], None],
) -> tuple[Tensor, Tensor | None]:
    """Run `attention` over the ring with the exchange of heads around it; differentiable.

    Args:
        mover: moves the tokens of the member's ranks to each of them.
        split: the heads of each rank.
        q: [s, b, h, d]; k: [s, b, g, d]; v: [s, b, g, e].
        sink: [h], or None.
        attention: the attention over the ring.
        with_lse: True exchanges lse too.
        start_backward: what backward does before its first message.

    Returns:
        out [s, b, h, e], and lse [b, h, s] or None.

    For two groups, nodes are made in this order, so that backward, which runs the other way,
    overlaps as forward does:

        keys 0 depart, keys 1 depart, keys 0 arrive, compute 0, out 0 departs, keys 1 arrive,
        compute 1, out 1 departs, out 0 arrives, out 1 arrives
    """
    size, sharing = split.size, (1, split.sharing, split.sharing)
    # groups of heads, each [s, b, ranks, heads of the group of a rank, d]
    cut = [x.unflatten(2, (min(size, x.shape[2]), split.groups, -1)).unbind(3) for x in (q, k, v)]

    def exchanged(*tensors: Tensor) -> Landing:
        return _exchanged(mover, size, tensors)

    def first_back(*gradients: Tensor) -> Landing:
        start_backward()
        return exchanged(*gradients)

    inputs = [
        Flight(exchanged, lambda *gradients: _returned(mover, size, gradients, sharing))
        for _ in range(split.groups)
    ]
    links, outs = [inputs[0].depart(*(x[0] for x in cut))], []
    for group, flight in enumerate(inputs):
        if group + 1 < split.groups:
            links.append(inputs[group + 1].depart(*(x[group + 1] for x in cut)))
        own_q, own_k, own_v = flight.arrive(links[group])
        first, last = split.queries[group][mover.rank]
        own_sink = None if sink is None else sink[first:last]
        out, lse = attention(own_q, own_k, own_v, own_sink, group)
        leaving = (out, lse.permute(2, 0, 1)[..., None]) if with_lse else (out,)
        back = first_back if group + 1 == split.groups else exchanged
        flight = Flight(lambda *tensors: _returned(mover, size, tensors), back)
        outs.append((flight, flight.depart(*leaving)))
    arrived = zip(*(flight.arrive(link) for flight, link in outs), strict=True)
    whole, *lses = (torch.stack(of_groups, 3).flatten(2, 4) for of_groups in arrived)
    return whole, lses[0][..., 0].permute(1, 2, 0) if lses else None


def _exchanged(mover: Mover, size: int, tensors: Sequence[Tensor]) -> Landing:
    """Send to each rank its heads of tensors [s, b, ranks, heads, d], which arrive as [S, b, heads,
    d]. If a tensor has fewer ranks than there are, neighboring ones get the same heads.
    """
    by_rank = [x.movedim(2, 0).contiguous().unbind(0) for x in tensors]
    parts = [[x[rank * len(x) // size] for x in by_rank] for rank in range(size)]
    return mover.there(parts, "heads")


def _returned(
    mover: Mover, size: int, tensors: Sequence[Tensor], sharing: Sequence[int] = (1, 1)
) -> Landing:
    """Send to each rank its tokens of tensors [S, b, heads, d], which arrive as [s, b, ranks,
    heads, d]. Gradients of heads that `sharing` neighboring ranks share arrive summed up.
    """
    land = mover.back([[x.contiguous() for x in tensors]] * size, "heads")

    def landed() -> list[Tensor]:
        of_ranks = zip(*land(), strict=True)
        return [
            torch.stack([_sum(parts[i : i + times]) for i in range(0, size, times)], 2)
            for parts, times in zip(of_ranks, sharing, strict=False)
        ]

    return landed


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum up in float32, in the order of ranks."""
    first, *others = parts
    if not others:
        return first
    total = first.to(sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)
