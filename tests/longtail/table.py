"""One row of the table: the same documents in each way to split them over ranks."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cp_ring.megatron.data.packing import balanced_order, pack
from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.time import Conditions
from tests.longtail import late
from tests.longtail.shapes import RANK_TOKENS

FILL = 0.96  # of the tokens of all microbatches; packing into short rows loses the rest
ONE = Conditions()


@dataclass(frozen=True)
class Result:
    """Of a step, over the ideal: one kernel call on all documents, divided evenly.

    formula, late: the seconds of attention by the formula, and with late peers. padding: of all
    tokens. microbatches: of a rank.
    """

    formula: float
    late: float
    padding: float
    microbatches: int


def ideal(lengths, ranks):
    """The seconds of one kernel call a rank, forward and backward."""
    pairs = int((lengths * (lengths + 1) // 2).sum()) / ranks
    return pairs * sum(ONE.pair_seconds(1))


def times(mask, layout, cp, heads):
    """The seconds of a plan, by the formula and with late peers; `heads`: by the fastest number of
    ranks that exchange heads.
    """
    split = Layout.balanced(mask, cp) if layout == "balanced" else layout
    assert isinstance(split, Layout)
    plans = [Plan.build(mask, split, ulysses=u) for u in (ONE.heads_to_try(cp) if heads else [1])]
    best = min(plans, key=lambda plan: plan.time(ONE).both)
    return best.time(ONE).both, late.seconds(best, ONE)


def one_ring(lengths, ranks, shape, microbatches):
    """All ranks are one ring, with as many rows as microbatches."""
    row = ranks * RANK_TOKENS
    packed = pack(lengths, row, cut_long=True)
    spent = np.zeros(2)
    for number in range(packed.rows):
        mask = Mask.documents(packed.cu_seqlens(number), n=row)
        spent += times(mask, "balanced", ranks, heads=True)
    return _result(lengths, ranks, spent, packed.rows * row, packed.rows)


def groups(lengths, ranks, shape, microbatches, *, layout, dealt):
    """Data-parallel groups of context-parallel ranks. dealt: rows go to groups by their work."""
    row, count = shape.group * RANK_TOKENS, ranks // shape.group
    packed = pack(lengths, row, cut_long=True)
    rows = -(-packed.rows // count) * count
    spent, work = np.zeros((2, rows)), np.zeros(rows)
    for number in range(packed.rows):
        offsets = packed.cu_seqlens(number)
        mask = Mask.documents(offsets, n=row)
        split = Layout.zigzag(row, shape.group) if layout == "zigzag" else layout
        spent[:, number], work[number] = times(mask, split, shape.group, heads=False), mask.area()
    order = np.arange(rows).reshape(count, -1)
    if dealt:
        order = balanced_order(work.reshape(count, -1, 1))[..., 0]
    slowest = spent[:, order].sum(2).max(1)
    return _result(lengths, ranks, slowest, rows * row, rows // count)


def dynamic(lengths, ranks, shape, microbatches, *, schedule):
    """Groups by microbatch, as Megatron's scheduler makes them, each timed with cp_ring's own
    transfers: TransformerEngine moves all keys to all ranks. Ranks of a group are neighbors.
    """
    chosen = schedule(RANK_TOKENS, shape.group, ranks // shape.group, None)
    microbatches_of = chosen.get_groups_and_subsamples([*enumerate(lengths.tolist())])
    known = {}
    spent, tokens = np.zeros(2), 0
    for of_ranks in microbatches_of:
        members = {}
        for ids in of_ranks:
            members[tuple(ids)] = members.get(tuple(ids), 0) + 1
        slowest = np.zeros(2)
        for ids, cp in members.items():
            key = (cp, *(int(lengths[i]) for i in ids))
            if key not in known:
                padded = [-(-size // (2 * cp)) * 2 * cp for size in key[1:]]
                offsets = np.cumsum([0, *padded])
                split = Layout.per_document_zigzag(offsets, cp)
                both = times(Mask.documents(offsets), split, cp, heads=False)
                known[key] = (*both, sum(padded))
            slowest = np.maximum(slowest, known[key][:2])
            tokens += known[key][2]
        spent += slowest
    return _result(lengths, ranks, spent, tokens, len(microbatches_of))


def _result(lengths, ranks, spent, tokens, count):
    least = ideal(lengths, ranks)
    padding = 1 - int(lengths.sum()) / tokens
    return Result(spent[0] / least, spent[1] / least, padding, count)


def scheduler_of(checkout):
    """Megatron's `DefaultDynamicCPScheduler` of a checkout of its branch dev."""
    sys.path.insert(0, checkout)
    from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler

    assert str(Path(checkout).resolve()) in str(importlib.util.find_spec("megatron.core").origin)
    return DefaultDynamicCPScheduler


def ways(schedule=None):
    yield "one ring, balanced", one_ring
    for layout in ("balanced", "zigzag"):
        for dealt in (True, False):
            name = f"dp x cp, {layout}" + ", rows dealt by work" * dealt
            yield name, _bound(groups, layout=layout, dealt=dealt)
    if schedule is not None:
        yield "groups by microbatch", _bound(dynamic, schedule=schedule)


def _bound(way, **named):
    return lambda *inputs: way(*inputs, **named)


def cell(way, shape, ranks, microbatches, draws):
    """The results of `draws` lists of documents, which nearly fill all microbatches."""
    tokens = int(ranks * RANK_TOKENS * microbatches * FILL)
    return [way(shape.documents(seed, tokens), ranks, shape, microbatches) for seed in range(draws)]
