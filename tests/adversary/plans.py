"""Attacks by chance: random masks, layouts, routes and schedules against attention in float64, and
spoiled plans.

Case number i of an attack is the same in every run, so that a failure can be repeated: its line
names the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import PlanError
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.proof.verify_ranks import verify_rank_plans
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.tiles import Tiles
from cp_ring.testing.local_ring import LocalRing
from tests.adversary import Try, attack
from tests.plan.mutations import PLAN_MUTATIONS, RANK_PLAN_MUTATIONS

Rng = np.random.Generator
# query heads, key/value heads, sizes of keys and of values
HEADS = ((1, 1, 4, 4), (2, 1, 8, 8), (4, 2, 4, 8), (3, 3, 8, 5))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Subject:
    """A random plan, what its mask allows by a formula of its own, and the arguments that say the
    same, where there are any.
    """

    plan: Plan
    allowed: np.ndarray  # bool [n, n]
    arguments: dict[str, Any]

    @property
    def words(self) -> str:
        plan = self.plan
        return f"{plan.mask!r}, {plan.layout!r}, {plan.route}, schedule {plan.schedule}"


def draw_mask(rng: Rng, n: int) -> tuple[Mask, np.ndarray, dict[str, Any]]:
    """A mask of `n` tokens, the pairs that it allows, and the arguments of `ring_attention` that
    say the same.
    """
    kind = rng.choice(["full", "causal", "documents", "documents", "prefix", "batch"])
    if kind == "batch" and n > 3:
        return _draw_rows(rng, n)
    left, right = (int(rng.integers(-1, 11)) if rng.random() < 0.6 else -1 for _ in range(2))
    cuts = (
        np.sort(rng.integers(0, n + 1, rng.integers(0, 5))).tolist()
        if kind in ("documents", "prefix")
        else []
    )
    offsets = [0, *cuts] if cuts and rng.random() < 0.4 else [0, *cuts, n]
    causal = kind == "causal" or (kind == "documents" and rng.random() < 0.6)
    query, key = np.arange(n)[:, None], np.arange(n)[None, :]
    document = np.searchsorted(offsets, np.arange(n), "right")
    together = (document[:, None] == document) & (query < offsets[-1]) & (key < offsets[-1])
    near = (key >= query - left) | (left < 0)
    last = query + (
        min(right, 0) if causal and right >= 0 else 0 if causal else n if right < 0 else right
    )
    if kind == "prefix":
        lengths = [int(rng.integers(0, end - start + 1)) for start, end in pairwise(offsets)]
        stop = np.array(
            [
                0,
                *(
                    start + length
                    for (start, _), length in zip(pairwise(offsets), lengths, strict=True)
                ),
                0,
            ]
        )
        last = np.maximum(last, stop[np.minimum(document, len(offsets))][:, None] - 1)
        mask = Mask.prefix(n, lengths, offsets, (left, right)) if offsets[-1] == n else None
        if mask is None:
            return draw_mask(rng, n)
        return mask, together & near & (key <= last), {}
    if kind == "documents":
        mask = Mask.documents(offsets, causal=causal, window=(left, right), n=n)
        arguments = {"cu_seqlens": offsets} if offsets[-1] == n else {}
    else:
        mask, arguments = (
            (Mask.causal if causal else Mask.full)(n, (left, right)),
            {"cu_seqlens": None},
        )
    arguments = arguments and arguments | {"causal": causal, "window_size": (left, right)}
    return mask, together & near & (key <= last), arguments


def _draw_rows(rng: Rng, n: int) -> tuple[Mask, np.ndarray, dict[str, Any]]:
    """Batch rows with masks of their own, as one stream."""
    first = int(rng.integers(2, n - 1))
    (one, its, _), (other, others, _) = draw_mask(rng, first), draw_mask(rng, n - first)
    allowed = np.zeros((n, n), bool)
    allowed[:first, :first], allowed[first:, first:] = its, others
    return Mask.batch([one, other]), allowed, {}


def draw_layout(rng: Rng, mask: Mask, cp: int) -> Layout:
    """A named layout, or one with chunks of any size on any rank; a rank may hold nothing."""
    n = mask.n
    kind = rng.choice(["zigzag", "contiguous", "balanced", "per_document_zigzag", "any", "any"])
    if kind == "per_document_zigzag" and n % (2 * cp) == 0:
        cuts = np.sort(rng.integers(0, n // (2 * cp) + 1, 2)) * 2 * cp
        return Layout.per_document_zigzag([0, *cuts.tolist(), n], cp)
    if kind == "any" or n < 2 * cp:
        edges = np.array(
            [0, *np.unique(rng.integers(1, max(n, 2), rng.integers(0, 3 * cp))).tolist(), n]
        )
        edges = np.unique(edges)
        return Layout(n, cp, edges, rng.integers(0, cp, len(edges) - 1), "any")
    return LAYOUTS[kind if kind in LAYOUTS else "zigzag"](mask, cp)


def draw_schedule(rng: Rng, cp: int) -> str | tuple[int, ...]:
    """A schedule, often one that has a name."""
    named = rng.choice(["auto", "ring", "gather", "any", "any"])
    if named != "any" or cp < 3:
        return str(named) if named != "any" else "auto"
    return (0, 1, *(1 + np.cumsum(rng.integers(0, 2, cp - 2))).tolist())


def draw(rng: Rng, max_cp: int, max_tokens: int, min_cp: int = 1) -> Subject:
    """Any plan."""
    cp = int(rng.integers(min_cp, max_cp + 1))
    mask, allowed, arguments = draw_mask(rng, int(rng.integers(max(cp, 2), max_tokens + 1)))
    layout, route, schedule = (
        draw_layout(rng, mask, cp),
        str(rng.choice(list(ROUTES))),
        draw_schedule(rng, cp),
    )
    plan = Plan.build(mask, layout, route, schedule)
    arguments = arguments and arguments | {"layout": layout, "route": route, "schedule": schedule}
    return Subject(plan, allowed, arguments)


@dataclass(frozen=True)
class Inputs:
    """Whole tensors [b, n, heads, size], and a sink [h] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None


def draw_inputs(rng: Rng, n: int, dtype: torch.dtype) -> Inputs:
    h, g, d, e = HEADS[rng.integers(len(HEADS))]
    b = int(rng.integers(1, 3))
    shapes = (b, n, h, d), (b, n, g, d), (b, n, g, e), (b, n, h, e)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in shapes)
    sink = torch.from_numpy(rng.standard_normal(h)).to(dtype) if rng.random() < 0.3 else None
    return Inputs(q * float(rng.choice([1.0, 1.0, 4.0])), k, v, dout, sink)


def brute_force(given: Inputs, allowed: np.ndarray) -> list[Tensor]:
    """out, dq, dk, dv and, with a sink, its gradient, in float64; a query that sees no key gives
    out 0.
    """
    leaves = [
        x.double().requires_grad_()
        for x in (given.q, given.k, given.v, *([] if given.sink is None else [given.sink]))
    ]
    q, k, v, *sink = leaves
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weight = torch.where(torch.from_numpy(allowed), (scores - scores.detach().amax()).exp(), 0.0)
    total = weight.sum(-1)
    if sink:
        total = total + (sink[0][:, None] - scores.detach().amax()).exp()
    blind = torch.from_numpy(~allowed.any(1))
    share = weight / torch.where(blind, 1.0, total)[..., None]
    out = torch.einsum("bhqk,bkhe->bqhe", share, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout.double())]


def on_rank(
    group: Any, subject: Subject, given: Inputs, tokens_first: bool, options: dict[str, Any]
) -> list[Tensor]:
    """out and gradients of the rank's shard, and its share of the sink's gradient."""
    rank, layout = group.rank, subject.plan.layout
    shards = [layout.shard(x, rank, 1) for x in (given.q, given.k, given.v, given.dout)]
    *leaves, dout = (x.transpose(0, 1) if tokens_first else x for x in shards)
    leaves = [x.detach().requires_grad_() for x in leaves]
    sink = None if given.sink is None else given.sink.detach().requires_grad_()
    out = ring_attention(
        *leaves, group, sink=sink, qkv_format="sbhd" if tokens_first else "bshd", **options
    )
    found = [out, *torch.autograd.grad(out, [*leaves, *([] if sink is None else [sink])], dout)]
    return [
        x.detach().transpose(0, 1) if tokens_first and place < 4 else x.detach()
        for place, x in enumerate(found)
    ]


def _nan_in_padding(given: Inputs, allowed: np.ndarray) -> Inputs:
    """The same with NaN in the tokens that neither see nor are seen."""
    alone = torch.from_numpy(~(allowed.any(0) | allowed.any(1)))[:, None, None]
    q, k, v, dout = (
        x.masked_fill(alone, torch.nan) for x in (given.q, given.k, given.v, given.dout)
    )
    return Inputs(q, k, v, dout, given.sink)


def difference(
    subject: Subject,
    given: Inputs,
    tolerance: float,
    tokens_first: bool,
    options: dict[str, Any],
    nan: bool = False,
) -> str:
    """In what attention over a local ring differs from brute force; "" where it does not. nan:
    padding holds NaN.
    """
    shown = _nan_in_padding(given, subject.allowed) if nan else given
    parts = LocalRing(subject.plan.cp).run(on_rank, subject, shown, tokens_first, options)
    columns = list(zip(*parts, strict=True))
    found = [subject.plan.layout.unshard(column, 1) for column in columns[:4]] + [
        sum(column) for column in columns[4:]
    ]
    truth = brute_force(given, subject.allowed)
    for name, x, wanted in zip(("out", "dq", "dk", "dv", "dsink"), found, truth, strict=False):
        error = float((x.double() - wanted).norm() / wanted.norm().clamp(min=1.0))
        if not error <= tolerance:
            return f"{name} is off by {error:.2g}"
    return ""


def _attention_case(rng: Rng, subject: Subject) -> str:
    dtype = torch.float64 if rng.random() < 0.8 else torch.float32
    given = draw_inputs(rng, subject.plan.n, dtype)
    options: dict[str, Any] = {"num_slots": int(rng.integers(2, 5))}
    by_arguments = bool(subject.arguments) and rng.random() < 0.5
    options |= subject.arguments if by_arguments else {"plan": subject.plan}
    tolerance = TOLERANCE[dtype]
    if rng.random() < 0.2:
        options["wire_dtype"], tolerance = "float32", TOLERANCE[torch.float32]
    return difference(
        subject, given, tolerance, bool(rng.random() < 0.5), options, nan=bool(rng.random() < 0.5)
    )


@attack("random attention against float64", cases=200)
def random_attention(folder: Path, cases: int) -> Iterator[Try]:
    """Every plan is proven, and attention by it through a ring of threads is that of a dense mask."""
    torch.set_num_threads(1)
    for number in range(cases):
        rng = np.random.default_rng([1, number])
        subject = draw(rng, 8, 96) if number % 10 == 9 else draw(rng, 4, 32)
        try:
            subject.plan.verify(rank_plans=number % 4 == 0)
            problem = _attention_case(rng, subject)
        except Exception as error:
            problem = f"{error!r:.300}"
        yield Try(f"case {number}: {subject.words}", problem)


@attack("plans spoiled by name", cases=1000)
def named_mutations(folder: Path, cases: int) -> Iterator[Try]:
    """Each way to spoil a plan or its rank plans is rejected by the proof."""
    names = [*PLAN_MUTATIONS, *RANK_PLAN_MUTATIONS]
    for number in range(cases):
        rng = np.random.default_rng([2, number])
        subject, name = draw(rng, max_cp=8, max_tokens=64, min_cp=2), names[number % len(names)]
        yield Try(
            f"case {number}: {name}: {subject.words}", _rejected_by_name(subject.plan, name, rng)
        )


def _rejected_by_name(plan: Plan, name: str, rng: Rng) -> str:
    if not len(plan.ring.tiles):
        return ""
    try:
        if name in PLAN_MUTATIONS:
            spoiled = PLAN_MUTATIONS[name](plan, rng)
            if spoiled is not None:
                spoiled.verify()
                return "the proof accepts it"
        else:
            parts = RANK_PLAN_MUTATIONS[name](
                [plan.rank_plan(rank) for rank in range(plan.cp)], rng
            )
            if parts is not None:
                verify_rank_plans(plan.ring, parts)
                return "the proof accepts it"
    except PlanError:
        pass
    except Exception as error:
        return f"an error that is not for users: {error!r:.200}"
    return ""


@attack("plans with a random number changed", cases=800)
def random_corruption(folder: Path, cases: int) -> Iterator[Try]:
    """Any number of a plan's tables is replaced by another: the proof rejects it, or the plan is
    another right one.
    """
    for number in range(cases):
        rng = np.random.default_rng([3, number])
        subject = draw(rng, max_cp=5, max_tokens=32, min_cp=2)
        what, spoiled = corrupt(subject.plan, rng)
        yield Try(
            f"case {number}: {what}: {subject.words}",
            _rejected_or_right(replace(subject, plan=spoiled), rng),
        )


def _rejected_or_right(subject: Subject, rng: Rng) -> str:
    try:
        subject.plan.verify()
    except PlanError as error:
        return "" if "\n" not in str(error) else "more than one line"
    except Exception as error:
        return f"an error that is not for users: {error!r:.200}"
    given = draw_inputs(rng, subject.plan.n, torch.float64)
    try:
        wrong = difference(subject, given, TOLERANCE[torch.float64], False, {"plan": subject.plan})
    except Exception as error:
        wrong = f"{error!r:.200}"
    return wrong and f"the proof accepts it, but {wrong}"


def corrupt(plan: Plan, rng: Rng) -> tuple[str, Plan]:
    """The plan with one number changed, and which one."""
    columns = {
        f"tiles.{name}": place for place, name in enumerate(("q0", "q1", "k0", "k1", "lo", "hi"))
    }
    tables = {
        f"{table}.{field.name}": None
        for table in ("transfers", "gradients")
        for field in fields(getattr(plan.ring, table))
    }
    others = ("tile_rank", "tile_hop", "tile_source", "layout.edges", "layout.owner", "schedule")
    name = str(rng.choice([*columns, *tables, *others]))
    owner, _, column = name.rpartition(".")
    if owner == "tiles":
        data = plan.ring.tiles.data.copy()
        data[columns[name]] = _changed(data[columns[name]], rng, plan.n)
        return name, _with_tables(plan, tiles=Tiles(data))
    if owner:
        table = getattr(plan.ring, owner)
        changed = replace(table, **{column: _changed(getattr(table, column), rng, plan.n)})
        if owner == "layout":
            return name, replace(_with_tables(plan, layout=changed), layout=changed)
        if rng.random() < 0.7:  # else the table may no longer be sorted
            changed = changed.in_buffer_order(
                "receiver" if owner == "transfers" else "sender", plan.ring.order
            )
        return name, _with_tables(plan, **{owner: changed})
    values = _changed(np.array(getattr(plan.ring, name)), rng, plan.cp)
    return name, _with_tables(
        plan, **{name: tuple(values.tolist()) if name == "schedule" else values}
    )


def _with_tables(plan: Plan, **changed: Any) -> Plan:
    return replace(plan, ring=replace(plan.ring, **changed), _rank_plans={})


def _changed(values: np.ndarray, rng: Rng, most: int) -> np.ndarray:
    values = values.copy()
    if len(values):
        place = rng.integers(len(values))
        anything = int(
            rng.choice(
                [rng.integers(-2, most + 3), -1 << 60, 1 << 60, values[rng.integers(len(values))]]
            )
        )
        values[place] = anything if rng.random() < 0.5 else values[place] + int(rng.choice([-1, 1]))
    return values
