"""The memory of one layer's attention: what a rank holds when it holds most, which is during a
kernel call of backward.

The walk over the calls keeps the books of the hop loop, of its sums and of its messages
(`cp_ring.hop_loop`, `cp_ring.ops.totals`, `cp_ring.comm`). Kernels are those of cuDNN: they sum up
dq in float32, and hold dk and dv for each query head if query heads share them. Packed calls hold
these in float32 too, for as many tokens as the class of their size has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cp_ring.plan.lower import BLOCK, Capabilities, call_groups, lower
from cp_ring.plan.message_order import message_order
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import OPEN, Hop, RankPlan, Transfer
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.updates import Partial, Update, gradient_updates, query_updates

FLOAT32 = 4
_PACKED = Capabilities(varlen=True)
_MOST_RANKS = 8  # that are walked: those that receive most keys in a hop


def memory(plan: Plan, sizes: AttentionSizes) -> dict[str, int]:
    """Return `rank_memory` of the rank that needs most."""
    keys, cp = plan.ring.transfers, plan.ring.cp
    arriving = np.bincount(keys.receiver * cp + keys.hop, keys.tokens, cp * cp).reshape(cp, cp)
    ranks = np.argsort(-arriving.max(1), kind="stable")[:_MOST_RANKS] * plan.ulysses
    return max((rank_memory(plan, rank, sizes) for rank in ranks.tolist()), key=_total)


def rank_memory(plan: Plan, rank: int, sizes: AttentionSizes) -> dict[str, int]:
    """Return the bytes of every buffer of a rank when it holds most. Those that begin with "kept"
    are kept from forward to backward. `sizes` are those of all heads of the layer.
    """
    ranks, own = plan.ulysses, sizes.of_rank(plan.ulysses)
    groups = split_heads(sizes.heads, sizes.kv_heads, ranks).groups if ranks > 1 else 1
    part = plan.rank_plan(rank)
    out = part.num_tokens * own.out_width * own.element
    inputs = part.num_tokens * (own.query_width + own.key_width) * own.element
    buffers = {
        "kept: q, k, v, out": inputs + out,
        "kept: lse": part.num_tokens * own.batch * own.heads * FLOAT32,
        "gradient of out": out,
    }
    if ranks > 1:
        # Either the first group computes while the gradients of the next one arrive, or the last
        # one does, and the gradients of q, k and v of the one before leave.
        first, last = min(3, 2 * groups - 1) * out, out + 2 * inputs - (groups - 1) * (inputs + out)
        buffers["kept: out of all heads"] = out
        buffers["gradients that are exchanged"] = max(first, last * (groups > 1)) // groups
    group = replace(own, heads=own.heads // groups, kv_heads=own.kv_heads // groups)
    return buffers | _most(part, group)


class _Sum:
    """The bytes of a total whose tokens have `width` elements of `element` bytes: of the partial
    results that wait, of what is summed up, and of the result.
    """

    def __init__(self, updates: Sequence[Update], tokens: int, width: int, element: int):
        self.updates, self.whole = deque(updates), tokens * width * element
        self.width, self.wide = width, element == FLOAT32
        self.waiting: list[int] = []
        self.running = self.result = 0

    def add(self, size: int) -> None:
        """Add a partial result of `size` bytes."""
        self.waiting.append(size)
        table, whole, kept = self.updates[0]
        if len(self.waiting) == len(table) // 2 - 2:
            if whole or self.wide or table[3].any():
                self.result = size if whole else self.whole
            if not (self.wide or table[2:4].all()):
                self.running = (kept.stop - kept.start) * self.width * FLOAT32
            self.waiting = []
            self.updates.popleft()


def _most(part: RankPlan, sizes: AttentionSizes) -> dict[str, int]:
    """Return the buffers of a rank's backward pass when they are most."""
    tokens, width, (of_keys, of_gradients) = part.num_tokens, sizes.key_width, sizes.on_wire()
    calls = [list(_calls(hop, part, sizes)) for hop in part.backward]
    updates = gradient_updates(part.backward, [[x.keys for x in each] for each in calls], tokens)
    queries = query_updates(([x.queries for x in each] for each in calls), tokens)
    dq = _Sum(queries, tokens, sizes.query_width, sizes.element)
    home = _Sum(updates[0], tokens, width, FLOAT32 if sizes.codec.latent else sizes.element)
    now, most = dict[str, int](), dict[str, int]()
    arriving: Sequence[tuple[Transfer, Transfer]] = ()
    order = message_order(part, 2, backward=True)
    for place, (hop, _, _, ahead) in enumerate(order):
        here, sums = home, [dq, home]
        if hop.index:
            here = _Sum(updates[hop.index], hop.num_grads, width, sizes.wire_element)
            sums.append(here)
        posted = sum(turn.hop.num_keys for turn in order[place:ahead] if turn.slot)
        now["keys and values: slots"] = posted * of_keys
        if not sizes.codec.plain:
            decoded = hop.num_keys * width * sizes.element
            now["keys and values, encoded and decoded"] = tokens * of_keys + decoded
        for call in calls[place]:
            now |= {
                "dq, dk, dv: partial results": call.results + sum(sum(x.waiting) for x in sums),
                "dq, dk, dv: sums in float32": sum(x.running for x in sums),
                "dq, dk, dv": sum(x.result for x in sums),
                "a kernel call: copies of its inputs": call.copies,
                "a kernel call: what it sums up": call.workspace,
            }
            most = max(most, dict(now), key=_total)
            dq.add(call.of_queries)
            here.add(call.results - call.of_queries)
        for transfer, _ in arriving:
            (here if transfer.buffer else home).add(0)
        arriving = hop.arrivals
        leaving = here.result if hop.index else 0
        now["dk, dv that travel"] = hop.num_arriving * of_gradients + leaving
    return most


class _Call(NamedTuple):
    """A kernel call: the tokens of dq and of dk, dv that it gives; bytes of dq, of all results, of
    copies of its inputs, and of what it sums up.
    """

    queries: Partial
    keys: Partial
    of_queries: int
    results: int
    copies: int
    workspace: int


def _calls(hop: Hop, part: RankPlan, sizes: AttentionSizes) -> Iterator[_Call]:
    """Yield the kernel calls of a hop, as `cp_ring.kernels.work` makes them."""
    element, shared = sizes.element, sizes.heads // sizes.kv_heads
    widths = sizes.query_width, sizes.key_width
    inputs = 2 * sizes.out_width + widths[0], widths[1]
    for which, few in hop.tiles.of_fewer_keys(part.num_tokens if shared > 1 else OPEN):
        lowered = lower(few, _PACKED)
        shift = hop.grad_shift[which][lowered.parent]
        for group in call_groups(lowered, varlen=True):
            every = [index for sequence in group for index in sequence]
            spans = (
                lowered.tiles.data[:2, [sequence[0] for sequence in group]],
                lowered.tiles.data[2:4, every],
            )
            packed = part.packed or len(every) > 1 or any(((b - a) % BLOCK).any() for a, b in spans)
            (q, k), classes, copied = zip(
                *(_side(a, b, part.num_tokens if packed else 0) for a, b in spans), strict=True
            )
            summed = (
                (widths[0] + sizes.batch * sizes.heads) * FLOAT32,
                widths[1] * shared * (FLOAT32 if packed else element) * (shared > 1),
            )
            yield _Call(
                Partial.of(spans[0].T.tolist()),
                Partial.of((spans[1] + shift[every]).T.tolist()),
                q * widths[0] * element,
                (q * widths[0] + k * widths[1]) * element,
                int(np.dot(np.multiply(copied, (q, k)), inputs)) * element,
                int(np.dot(classes, summed)),
            )


def _side(start: Ints, end: Ints, shard: int) -> tuple[int, int, bool]:
    """Return the tokens of the queries or keys of a call with those that fill it up, the size of
    their class (`cp_ring.kernels.te_sizes`), and whether it copies them. `shard` 0 is for dense
    calls.
    """
    count = int((end - start).sum())
    if not shard:
        return count, count, False
    whole = max(1 << (shard - 1).bit_length(), 1024)
    size = max(whole // 4, 1024)
    if count > size:
        size = max(whole, 1 << (count - 1).bit_length())
    held = max(count, size // 2 + 1)
    return held, size, held > count or bool((start[1:] != end[:-1]).any())


def _total(buffers: dict[str, int]) -> int:
    return sum(buffers.values())
