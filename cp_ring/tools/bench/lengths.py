"""`cp-ring bench lengths`: documents of a long-tailed set, split over ranks in five ways, timed.

A round is forward and backward of attention and of token-wise layers. `independent` is what data
parallelism does: each rank gets whole documents, the largest first, each to the rank with least
work. `dynamic` is Megatron's hybrid context parallelism: its scheduler says which ranks share which
document, and ranks wait for one another between groups of documents. Rounds take turns, so that a
slow minute of a shared machine slows all splits alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.plan.costs.splits import padded
from cp_ring.plan.layout import LAYOUTS as PLAN_LAYOUTS
from cp_ring.plan.ranges import Ints
from cp_ring.testing.rank_pool import Ranks
from cp_ring.tools.job.speeds import PREPARED, in_turn

LAYOUTS = ("balanced", "zigzag", "per_document_zigzag", "independent", "dynamic")

Shares = list[list[list[tuple[int, Plan]]]]
"""For each group of documents and each rank, what it works on: plans, each with the first of the
neighboring ranks that share it.
"""


@dataclass(frozen=True)
class PackedWork:
    """Documents of `lengths` on `cp` ranks; `heads` heads of `head_dim`, and a feed-forward network
    of 4 times their width.
    """

    lengths: tuple[int, ...]
    cp: int = 4
    heads: int = 4
    head_dim: int = 64

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.heads * self.head_dim

    @property
    def token_work(self) -> float:
        """What the token-wise layers cost for a token, in pairs of attention."""
        return (3 + 4 + 4) * self.width / 2


def plan(work: PackedWork, name: str) -> Plan:
    """The plan of one of the splits that have one."""
    lengths = np.array(work.lengths, np.int64)
    if name == "per_document_zigzag":
        lengths = padded(lengths, work.cp)
    offsets = np.cumsum([0, *lengths])
    mask = Mask.documents(offsets)
    if name == "per_document_zigzag":
        return Plan.build(mask, Layout.per_document_zigzag(offsets, work.cp))
    return Plan.build(mask, PLAN_LAYOUTS[name](mask, work.cp))


def greedy(work: PackedWork) -> list[list[int]]:
    """The lengths of the documents of each rank, by greedy balance of work."""
    load = [0.0] * work.cp
    mine: list[list[int]] = [[] for _ in range(work.cp)]
    for length in sorted(work.lengths, reverse=True):
        least = load.index(min(load))
        load[least] += length * (length + 1) / 2 + work.token_work * length
        mine[least].append(length)
    return mine


def shares(work: PackedWork, name: str) -> Shares:
    """Who works on what in a split."""
    if name == "independent":
        alone = [
            [Plan.build(Mask.documents(np.cumsum([0, *mine])), Layout.contiguous(sum(mine), 1))]
            if mine
            else []
            for mine in greedy(work)
        ]
        return [[[(rank, each) for each in plans] for rank, plans in enumerate(alone)]]
    if name != "dynamic":
        return [[[(0, plan(work, name))]] * work.cp]
    from cp_ring.megatron.hybrid_schedule import hybrid_groups  # imports Megatron

    lengths = padded(np.array(work.lengths, np.int64), work.cp)
    groups: Shares = []
    for group in hybrid_groups(lengths, work.cp, -(-int(lengths.sum()) // work.cp)):
        ranks = {i: [r for r, mine in enumerate(group) if i in mine] for i in {*chain(*group)}}
        plans = {
            i: (of[0], Plan.build(Mask.causal(int(lengths[i])), Layout.zigzag(lengths[i], len(of))))
            for i, of in ranks.items()
        }
        groups.append([[plans[i] for i in mine] for mine in group])
    return groups


def about(work: PackedWork, name: str) -> dict[str, Any]:
    """What a split computes and moves: {layout, tokens, balance, bytes}.

    tokens: of all ranks, padding included. balance: maximum over mean pairs of attention. bytes:
    keys, values and their gradients
    that move in forward and backward, in float32.
    """
    pairs, moved, tokens = np.zeros(work.cp), 0, 0
    for rank, mine in chain(*map(enumerate, shares(work, name))):
        for first, each in mine:
            if first == rank:
                report = each.verify()
                pairs[rank : rank + each.cp] += report.work_per_rank
                moved += 2 * int(report.keys_in.sum()) + int(report.grads_in.sum())
                tokens += int(report.tokens_per_rank.sum())
    return {
        "layout": name,
        "tokens": tokens,
        "balance": float(pairs.max() / pairs.mean()),
        "bytes": moved * 2 * work.width * 4,
    }


def prepare(group: Any, name: str, work: PackedWork) -> None:
    """On a rank: makes a split's tensors and runs it once."""
    generator, width = torch.Generator().manual_seed(group.rank()), work.width
    weights = [
        torch.randn(*shape, generator=generator).mul_(0.02).requires_grad_()
        for shape in ((width, 3 * width), (width, 4 * width), (4 * width, width))
    ]
    split = shares(work, name)
    sharing = {(first, each.cp) for of in split for mine in of for first, each in mine}
    # each rank takes part in making each group
    groups = {
        (first, cp): group if cp == work.cp else dist.new_group(range(first, first + cp))
        for first, cp in sorted(sharing)
        if cp > 1
    }

    def draw(first: int, of: Plan) -> Tensor:
        tokens = int(of.layout.tokens_per_rank[group.rank() - first])
        return torch.randn(1, tokens, width, generator=generator).requires_grad_()

    mine = [[(draw(*share), *share) for share in of[group.rank()]] for of in split]

    def one_round() -> None:
        for parts in mine:
            for x, first, each in parts:
                q, k, v = (x @ weights[0]).unflatten(2, (3, work.heads, -1)).unbind(2)
                mixed = ring_attention(q, k, v, groups.get((first, each.cp)), plan=each)
                out: Tensor = F.gelu(mixed.flatten(2) @ weights[1]) @ weights[2]
                torch.autograd.grad(out.sum(), [x, *weights])
            if len(mine) > 1:
                dist.barrier(group)

    one_round()
    PREPARED[name] = one_round


def run(work: PackedWork, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Results {layout, median_s, cpu_s, tokens, balance, bytes, times} of each split, by one
    forward and backward.

    median_s: seconds of the slowest rank by the clock, median of the rounds. cpu_s: seconds of the
    rank that computed longest,
    median; it does not depend on how many cores the machine has, and little on other programs.
    """
    ranks = Ranks(work.cp)
    try:
        for name in names:
            ranks.run(prepare, work.cp, name, work)
        measured = in_turn({name: (ranks, work.cp, name) for name in names}, repeats)
    finally:
        ranks.close()
    return [about(work, name) | times for name, times in measured.items()]


def long_tail(n: int, seed: int) -> Ints:
    """Lengths of one document of a quarter to three quarters of `n` tokens, and short ones of n /
    256 on average.
    """
    from cp_ring.tools.bench import samples

    return np.diff(samples.one_long(n, max(n / 256, 1), seed))
