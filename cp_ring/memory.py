"""The memory of one layer's attention: what a rank holds when it holds most, which is during a
kernel call of backward.

It walks over the calls that the executor makes, and keeps the books of the hop loop, of its sums
and of its messages (`cp_ring.hop_loop`, `cp_ring.ops.totals`, `cp_ring.comm`). Kernels are
TransformerEngine's: cuDNN sums up dq in float32, and holds dk and dv for each query head if query
heads share them. Its packed calls hold these in float32 too, for as many tokens as the class of
their size has. Deterministic calls, and those of an A100, hold more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cp_ring.kernels.calls import KernelCall
from cp_ring.kernels.packed import PackedCall
from cp_ring.kernels.transformer_engine import KERNEL
from cp_ring.kernels.work import work_of
from cp_ring.ops.segments import Segments
from cp_ring.plan.message_order import message_order
from cp_ring.plan.plan import Plan
from cp_ring.plan.records import RankPlan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes

FLOAT32 = 4


def memory(plan: Plan, sizes: AttentionSizes) -> dict[str, int]:
    """Return `rank_memory` of the rank that needs most, of the eight that receive most keys."""
    keys = plan.ring.transfers
    received = -np.bincount(keys.receiver, keys.tokens, plan.ring.cp)
    ranks = received.argsort(kind="stable")[:8] * plan.ulysses
    return max((rank_memory(plan, rank, sizes) for rank in ranks.tolist()), key=_total)


def rank_memory(plan: Plan, rank: int, sizes: AttentionSizes) -> dict[str, int]:
    """Return the bytes of every buffer of a rank when it holds most. Those that begin with "kept"
    are kept from forward to backward. `sizes` are those of all heads of the layer.
    """
    ranks, own = plan.ulysses, sizes.of_rank(plan.ulysses)
    groups, part = sizes.groups(ranks), plan.rank_plan(rank)
    out = part.num_tokens * own.out_width * own.element
    inputs = part.num_tokens * (own.query_width + own.key_width) * own.element
    buffers = {
        "kept: q, k, v, out": inputs + out,
        "kept: lse": part.num_tokens * own.batch * own.heads * FLOAT32,
        "gradient of out": out,
    }
    if ranks > 1:
        # While the first group computes, the gradients of the next one arrive.
        buffers["kept: out of all heads"] = out
        buffers["gradients of out of the heads"] = min(3, 2 * groups - 1) * out // groups
    own = replace(own, heads=own.heads // groups, kv_heads=own.kv_heads // groups)
    return buffers | _most(part, own)


class _Sum:
    """The bytes of a total whose tokens have `width` elements of `element` bytes: of the partial
    results that wait, of what is summed up, and of the result (`cp_ring.ops.totals.Sum`).
    """

    def __init__(self, updates: Sequence[Segments], tokens: int, width: int, element: int):
        self.updates, self.whole = deque(updates), tokens * width * element
        self.wide = 0 if element == FLOAT32 else width * FLOAT32
        self.waiting: list[int] = []
        self.running = self.result = 0

    def add(self, size: int) -> None:
        """Add a partial result of `size` bytes."""
        self.waiting.append(size)
        update = self.updates[0]
        if len(self.waiting) == update.parts:
            if update.whole or update.ends or not self.wide:
                self.result = self.whole
            if update.stays:
                self.running = (update.kept.stop - update.kept.start) * self.wide
            self.waiting = []
            self.updates.popleft()


def _most(part: RankPlan, sizes: AttentionSizes) -> dict[str, int]:
    """Return the buffers of a rank's backward pass when they are most."""
    tokens, width, (of_keys, of_gradients) = part.num_tokens, sizes.key_width, sizes.on_wire()
    work = work_of(part, KERNEL, torch.device("cpu"), True, sizes.heads > sizes.kv_heads)
    dq = _Sum(work.queries, tokens, sizes.query_width, sizes.element)
    home = _Sum(work.keys[0], tokens, width, FLOAT32 if sizes.codec.latent else sizes.element)
    arriving: list[int] = []
    now, most = dict[str, int](), dict[str, int]()
    order = message_order(part, 2, backward=True)
    for place, (hop, _, _, ahead) in enumerate(order):
        sums = [dq, home]
        if hop.index:
            sums.append(_Sum(work.keys[hop.index], hop.num_grads, width, sizes.wire_element))
        posted = [turn.hop.num_keys for turn in order[place:ahead] if turn.slot]
        now["keys and values: slots"] = sum(posted) * of_keys
        if not sizes.codec.plain:
            decoded = hop.num_keys * width * sizes.element
            now["keys and values, encoded and decoded"] = tokens * of_keys + decoded
        for call in work.calls[hop]:
            of_queries, of_hop, now["a kernel call"] = _bytes(call, sizes)
            held = sum(sum(x.waiting, x.running + x.result) for x in sums)
            now["dq, dk, dv: results and sums"] = held + of_queries + of_hop
            most = max(most, dict(now), key=_total)
            dq.add(of_queries)
            sums[-1].add(of_hop)
        for elsewhere in arriving:
            sums[-1 if elsewhere else 1].add(0)
        arriving = [transfer.buffer for transfer, _ in hop.arrivals]
        now["dk, dv that arrive"] = hop.num_arriving * of_gradients
        now["dk, dv that leave"] = sum(x.result for x in sums[2:])
    return most


def _bytes(call: KernelCall, sizes: AttentionSizes) -> tuple[int, int, int]:
    """Return the bytes of a call: of dq, of dk and dv, and of copies of its inputs and what the
    kernel sums up.
    """
    of_queries, of_keys, element = sizes.query_width, sizes.key_width, sizes.element
    copied, of_sum = 0, element
    size_q, size_k = q, k = [int(np.diff(x.ranges[:2].T).sum()) for x in (call.queries, call.keys)]
    if isinstance(call, PackedCall):
        of_sum = FLOAT32
        q, k = (len(side.tokens.tokens()) for side in (call.q, call.k))
        size_q, size_k = call.q.longest, call.k.longest
        copied = q * (of_queries + 2 * sizes.out_width) * bool(call.q.tokens.index)
        copied += k * of_keys * bool(call.k.tokens.index)
    summed = size_q * (of_queries + sizes.batch * sizes.heads) * FLOAT32
    if (shared := sizes.heads // sizes.kv_heads) > 1:
        summed += size_k * of_keys * shared * of_sum
    return q * of_queries * element, k * of_keys * element, copied * element + summed


def _total(buffers: dict[str, int]) -> int:
    return sum(buffers.values())
