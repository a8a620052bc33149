"""The proof stands alone: faults planted in what planner, lowering, updates and orders of messages
share are found by it, and it imports nothing of them.
"""

import ast
import sys
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cp_ring.errors import PlanError
from cp_ring.kernels import calls, packed, work
from cp_ring.plan import (
    OPEN,
    Layout,
    Mask,
    Plan,
    PlanSpec,
    message_order,
    moves,
    proof,
    ranges,
    rank_plan,
    records,
    routes,
    tiles,
    updates,
)
from cp_ring.plan.shard_tiles import tiles_in_stream
from cp_ring.plan.tiles import paint
from tests.plan.strategies import CAPABILITIES
from tests.rings import said, with_backward

CPU = torch.device("cpu")
LOWER = sys.modules["cp_ring.plan.lower"]


def test_the_proof_imports_no_maker_of_plans():
    """At run time: errors, records and numpy."""
    for module, allowed in (
        (proof, {"cp_ring.errors", "cp_ring.plan.records"}),
        (records, set()),
    ):
        tree = ast.parse(Path(module.__file__).read_text())
        kept = [node for node in tree.body if not isinstance(node, ast.If)]  # TYPE_CHECKING
        names = {
            name
            for top in kept
            for node in ast.walk(top)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                         [alias.name for alias in node.names])
        }  # fmt: skip
        of_python = {name for name in names if name.partition(".")[0] in sys.stdlib_module_names}
        assert names - of_python - {"numpy", "numpy.typing"} == allowed
    assert records.OPEN == OPEN


def makers():
    """Makers of plans of all kinds of tiles, small enough to be painted."""
    documents = Mask.documents([0, 21, 50, 51, 90, 96])
    striped = Layout(96, 6, np.arange(0, 97, 4), np.arange(24) % 6, "striped")
    uneven = Layout(
        96, 3, np.array([0, 7, 40, 41, 60, 83, 96]), np.array([1, 0, 2, 1, 2, 0]), "any"
    )
    tree = Mask.tree([-1, 0, 0, 1], [30, 20, 26, 20])
    window = Mask.causal(96, (13, 0))
    for mask in (Mask.causal(96), Mask.full(96), documents, window, tree, Mask.full(96, (6, 9))):
        build = partial(Plan.build, mask)
        yield partial(build, Layout.zigzag(96, 4))
        yield partial(build, Layout.zigzag(96, 4), "ring", "ring")
        yield partial(build, striped, schedule=(0, 1, 1, 2, 2, 2))
        yield partial(build, uneven, schedule="gather")
        yield partial(build, Layout.zigzag(96, 4), ulysses=2)
        yield partial(one_source_in_backward, mask)


def one_source_in_backward(mask):
    layout = Layout.zigzag(96, 4)
    plan, back = (Plan.build(mask, layout, schedule=name) for name in ("auto", "ring"))
    return with_backward(plan, back)


def paints_its_mask(plan):
    return np.array_equal(paint(tiles_in_stream(plan.ring)[0], plan.n, plan.n), plan.mask.dense())


def prove(plan, num_slots):
    """Everything that runs: tables, rank plans, orders, and work of kernels of all abilities."""
    plan.verify(num_slots, rank_plans=True)
    for rank in range(plan.cp):
        part = plan.rank_plan(rank)
        for backward in (False, True):
            for abilities in CAPABILITIES:
                work._make_work(part, abilities, None, CPU, backward)


def plant(patch, owner, name, fault):
    """Puts `fault`, which gets the right one first, in place of a function: of a route, of a class,
    or in each module that has it.
    """
    if isinstance(owner, dict):
        spoiled = partial(fault, owner[name].transfers)
        patch.setitem(owner, name, replace(owner[name], transfers=spoiled))
        return
    if isinstance(owner, type):
        right = owner.__dict__[name]
        if isinstance(right, classmethod):
            spoiled = staticmethod(partial(fault, getattr(owner, name)))
        elif isinstance(right, cached_property):
            spoiled = property(partial(fault, right.func))
        else:

            def spoiled(*args, **more):
                return fault(right, *args, **more)

        patch.setattr(owner, name, spoiled)
        return
    original = getattr(owner, name)
    spoiled = partial(fault, original)
    for each in [*sys.modules.values()]:
        ours = getattr(each, "__name__", "").startswith("cp_ring.")
        if ours and each.__dict__.get(name) is original:
            patch.setattr(each, name, spoiled)


def few_cells(overlaps, *args):
    which, cell = overlaps(*args)
    first = np.searchsorted(which, which)
    keep = np.arange(len(which)) - first < 5
    return which[keep], cell[keep]


def without_last(overlaps, *args):
    which, cell = overlaps(*args)
    last = np.append(which[1:] != which[:-1], True)[: len(which)]
    alone = np.bincount(which, minlength=len(which) + 1)[which] == 1
    return which[~last | alone], cell[~last | alone]


def one_token_short(union, *args):
    group, start, end = union(*args)
    return group, start, np.where(end - start > 3, end - 1, end)


def unsorted(sort_index, *keys):
    return slice(None)


def no_band_left(within, *args, **more):
    data = within(*args, **more).data.copy()
    data[4] = np.where(data[5] == OPEN, -OPEN, data[4])
    return tiles.Tiles(data)


def one_key_more(shifted, *args):
    data = shifted(*args).data.copy()
    data[3] += (data[3] - data[2] == 7) & (data[5] == OPEN)
    return tiles.Tiles(data)


def joins_all_neighbors(unions, table, group, along_queries):
    a, b = table.data[:, :-1], table.data[:, 1:]
    near = (a[1] == b[0]) if along_queries else (a[3] == b[2]) & (a[:2] == b[:2]).all(0)
    first = np.flatnonzero(near & (group[:-1] == group[1:]))
    larger = np.array([[False, True, False, True, True, False]]).T
    hulls = np.where(larger, np.maximum(a, b), np.minimum(a, b))
    return first, tiles.Tiles(hulls[:, first])


def late_chunk(starts, layout):
    found = starts(layout).copy()
    found[-1] += found[-1] > 4
    return found


def swapped_senders(direct, need, cp):
    keys, grads = direct(need, cp)
    if len(keys) > 1:
        sender = keys.sender.copy()
        sender[[0, -1]] = sender[[-1, 0]]
        keys = replace(keys, sender=sender)
    return keys, grads


def gradients_of_first_hop(direct, need, cp):
    keys, grads = direct(need, cp)
    return keys, grads[grads.hop > 1] if (grads.hop > 1).any() else grads


def stale_slide(slides, *of_rank):
    slide = slides(*of_rank)
    return lambda owner, start: slide(np.minimum(owner, 1), start)


def thinner_rectangle(columns, q0, q1, k0, k1, lo=-OPEN, hi=OPEN):
    k1 = np.where(np.asarray(k1) - k0 > 8, np.asarray(k1) - 1, k1)
    return columns(q0, q1, k0, k1, lo, hi)


def thick_strips(expand, first, count):
    which, number = expand(first, count)
    return which, np.where(number == 2, 1, number)


def without_last_sequence(call_groups, lowered, varlen):
    groups = call_groups(lowered, varlen)
    return [group[:-1] if len(group) > 1 else group for group in groups]


def late_tokens(part_of, found, first=0, reverse=False, arrived=False):
    return part_of(found, first + (1 if arrived and first else 0), reverse, arrived)


def reversed_alike(part_of, found, first=0, reverse=False, arrived=False):
    return part_of(found, first, False, arrived)


def joined_parts(joined, table):
    found = joined(table)
    found[2] = 1
    return found


def half_memory(running, *of):
    right = running(*of)
    return slice(right.start, right.stop - (right.stop > 3))


def posted_too_early(order, *given):
    turns = order(*given)
    return tuple(turn._replace(ahead=len(turns)) for turn in turns)


def one_slot(order, *given):
    return tuple(turn._replace(slot=min(turn.slot, 1)) for turn in order(*given))


def other_side_of_gradients(order, part, num_slots, backward):
    """Keys are posted one hop later than on other ranks, in backward."""
    turns = order(part, num_slots, backward)
    late = [turn._replace(ahead=place + 1) for place, turn in enumerate(turns)]
    return tuple(late) if backward and part.rank == 1 else turns


def target_by_source(gathered, *args):
    found = gathered(*args)
    return replace(found, target=found.target[::-1].copy())


def other_side(of, sequences, window, *more):
    return of(sequences, window[::-1], *more)


def not_turned(of, tile, shift, reverse):
    call = of(tile, shift, reverse)
    return replace(call, lo=-call.hi, hi=-call.lo) if reverse else call


FAULTS = {
    "overlaps: cells beyond the fifth are lost": (ranges, "overlaps", few_cells),
    "overlaps: the last of several cells is lost": (ranges, "overlaps", without_last),
    "union: one token short": (ranges, "union", one_token_short),
    "sort_index: nothing is sorted": (ranges, "sort_index", unsorted),
    "within: left sides get lost": (tiles.Tiles, "within", no_band_left),
    "shifted: one key more": (tiles.Tiles, "shifted", one_key_more),
    "coalesce: any neighbors": (tiles, "_unions", joins_all_neighbors),
    "layout: the last chunk begins a token late": (Layout, "starts", late_chunk),
    "direct: two senders change places": (routes.ROUTES, "direct", swapped_senders),
    "direct: gradients of the first hop stay": (routes.ROUTES, "direct", gradients_of_first_hop),
    "rank plan: offsets of the first source": (rank_plan, "_slides", stale_slide),
    "lower: a column of a rectangle": (tiles.Tiles, "columns", thinner_rectangle),
    "expand: the third number is the second": (ranges, "expand", thick_strips),
    "lower: the last sequence of a call": (LOWER, "call_groups", without_last_sequence),
    "updates: rows of messages one token late": (updates.Partial, "of", late_tokens),
    "updates: reversed rows are not": (updates.Partial, "of", reversed_alike),
    "updates: totals begin twice": (updates, "_joined", joined_parts),
    "updates: running total too short": (updates, "_kept", half_memory),
    "order: all keys at once": (message_order, "message_order", posted_too_early),
    "order: one slot for all": (message_order, "message_order", one_slot),
    "order: after the gradients": (message_order, "message_order", other_side_of_gradients),
    "moves: targets change places": (moves.Moves, "gathered", target_by_source),
    "packed: sides of the window": (packed.PackedCall, "of", other_side),
    "single: reversed bands": (calls.SingleCall, "of", not_turned),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_alone_finds_a_planted_fault(monkeypatch, fault):
    """A plan that a planted fault makes wrong is rejected; one that passes paints its mask."""
    found, passed, stumbled = [], [], 0
    with monkeypatch.context() as patch:
        plant(patch, *FAULTS[fault])
        for make in makers():
            try:
                plan = make()
                line = said(prove, plan, 3)
            except Exception:  # something that is not the proof stumbles over the fault
                stumbled += 1
                continue
            found += [line] if line else []
            passed += [] if line else [plan]
            if len(found) == 2:
                break
    assert found, f"{stumbled} makers stumbled"
    assert all(map(paints_its_mask, passed))


def test_the_plans_without_a_fault_are_right():
    for make in makers():
        plan = make()
        prove(plan, 3)
        assert paints_its_mask(plan)


def test_a_rank_proves_its_part_without_the_others():
    """A key that another rank's tile reads too often is found by the keys' owner."""
    mask, layout = Mask.documents([0, 21, 50, 64]), Layout.zigzag(64, 4)
    for rank in range(4):
        plan = Plan.build(mask, layout)
        tables = PlanSpec(layout).build(mask, 4, rank).ring
        proof.verify(tables)
        others = np.flatnonzero(tables.tile_rank != rank)
        for tile in others[:1]:
            data = tables.tiles.data.copy()
            data[1, tile] -= 1
            spoiled = replace(tables, tiles=tiles.Tiles(data))
            assert "computes other" in said(proof.verify, spoiled) or "see nothing" in said(
                proof.verify, spoiled
            )
        assert plan.proven_part(rank) is plan.rank_plan(rank)


def test_only_proven_plans_run(monkeypatch):
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4))
    seen = []
    monkeypatch.setattr("cp_ring.plan.plan.verify", lambda *given: seen.append("tables"))
    monkeypatch.setattr("cp_ring.plan.plan.check_rank_plan", lambda *given: seen.append("rank"))
    plan.proven_part(1), plan.proven_part(1), plan.proven_part(2)
    assert seen == ["tables", "rank", "rank"]
    replace(plan, layout=plan.layout).proven_part(1)  # another plan, of which nothing is known
    assert seen[3:] == ["tables", "rank"]
    monkeypatch.setattr(
        "cp_ring.plan.plan.verify", lambda *given: (_ for _ in ()).throw(PlanError("x"))
    )
    assert said(PlanSpec().build_rank_plan, Mask.causal(64), 4, 1) == "x"
