"""The plans of cells: how fast they are predicted to be by the formula and by the referee."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np

from cp_ring.plan import Layout, Plan
from cp_ring.plan.balance import balance
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.plan.time import Conditions
from cp_ring.tools.plan import kernel_calls
from tests.longca import referee
from tests.longca.masks import TOKENS, Cell

SIZES, NODE = AttentionSizes(64, 8, 128), 8
GIVEN = Conditions(SIZES, RATES, NODE)
FULL = replace(GIVEN, rates=replace(RATES, processors=1e-9))
"""No processor is without a block, as in the one call that plans are compared with."""

FOLDER = Path(__file__).parent
BASELINE = FOLDER / "baseline.json"
"""Of each cell, the shares of one call of the default plan of the version before, as in `Row`."""


@dataclass(frozen=True)
class Row:
    """A cell's plan. formula, referee: the share of the speed of one kernel call in forward, and in
    forward and backward. moved: keys on the wire, as a share of a ring in which all shards visit
    all ranks. calls: in forward, on the busiest rank. alike: backward has the hops of forward.
    milliseconds: of the CPU, for layout, plan, proof and formula.
    """

    cell: Cell
    heads: int
    hops: int
    balance: float
    formula: tuple
    referee: tuple
    moved: float
    calls: int
    alike: bool
    milliseconds: tuple


def row(cell):
    """The balanced layout, with the heads of least time by the formula."""
    mask, clock = cell.mask(), [process_time()]
    layout = Layout.balanced(mask, cell.cp)
    clock.append(process_time())
    found = []
    for heads in GIVEN.heads_to_try(cell.cp):
        times = [process_time()]
        plan = Plan.build(mask, layout, ulysses=heads)
        times.append(process_time())
        proven = plan.verify()
        times.append(process_time())
        both = plan.time(GIVEN).both
        times.append(process_time())
        found.append((both, plan, proven, np.diff(times)))
    _, plan, proven, times = min(found, key=lambda one: one[0])
    return Row(
        cell,
        plan.ulysses,
        plan.schedule[-1],
        balance([(mask, 1)], layout),
        _by_formula(plan),
        _by_referee(plan),
        int(proven.keys_in.sum()) / ((cell.cp - 1) * mask.n),
        max(kernel_calls(plan) or [0]),
        plan.ring.of_backward is None,
        tuple(1e3 * time for time in (clock[1] - clock[0], *times)),
    )


def _by_formula(plan):
    time = plan.time(FULL)
    return time.there.ideal / time.forward, time.ideal / time.both


def _by_referee(plan):
    forward, both, slowest, slowest_both = referee.seconds(plan, SIZES, NODE)
    return forward / slowest, both / slowest_both


def bound(cell):
    """What no layout, hops and heads of `Conditions.heads_to_try` exceed, as a share in forward and
    backward: the keys of the query that sees the most reach its node from others.
    """
    mask, best = cell.mask(), 0.0
    pieces = mask.pieces
    begins, ends = (
        np.clip(x, pieces.q0, pieces.q1 - 1) for x in (pieces.k0 - pieces.lo, pieces.k1 - pieces.hi)
    )
    seen = 0
    for query in np.unique(np.concatenate([pieces.q0, begins, ends, pieces.q1 - 1])):
        row = pieces.within(query, query + 1)
        seen = max(seen, int(row.area()[row.q0 < row.q1].sum()))
    there, back = (mask.area() / cell.cp * flops / RATES.forward for flops in SIZES.pair_flops)
    for heads in GIVEN.heads_to_try(cell.cp):
        keys, gradients = SIZES.of_rank(heads).on_wire()
        far = max(0, seen - NODE * TOKENS) / RATES.between
        exchange = GIVEN.exchange(TOKENS, heads)
        least = max(there, far * keys) + max(back, far * (keys + gradients)) + 2 * exchange
        best = max(best, (there + back) / least)
    return best


def before():
    """Shares of the version before: by the formula (forward, both), by its own model (the same)."""
    return json.loads(BASELINE.read_text())


def slower(one, before):
    """Whether forward and backward are slower than before by either model, by more than a tenth of
    a percent; by the referee 3 percent, where hops of one shard in backward save memory.
    """
    least = 0.999 if one.alike else 0.97
    return one.formula[1] < 0.999 * before[1] or one.referee[1] < least * before[3]


def printed(rows):
    """A line of Markdown for each kind and number of ranks; means of the draws, and the worst."""
    yield (
        "| mask, cp | draws | formula | before | referee | before | slower | balance | heads | "
        "hops | moved | calls | CPU ms |"
    )
    yield "|" + "---|" * 13
    old = before()
    for kind, cp in dict.fromkeys((one.cell.kind, one.cell.cp) for one in rows):
        of = [one for one in rows if (one.cell.kind, one.cell.cp) == (kind, cp)]
        was = np.mean([old[str(one.cell)] for one in of], axis=0)
        balance, calls = [one.balance for one in of], [one.calls for one in of]
        cpu = np.max([one.milliseconds for one in of], axis=0)
        columns = [
            f"{kind} {cp}",
            len(of),
            _pair(np.mean([one.formula for one in of], axis=0)),
            _pair(was[:2]),
            _pair(np.mean([one.referee for one in of], axis=0)),
            _pair(was[2:]),
            sum(slower(one, old[str(one.cell)]) for one in of),
            f"{np.mean(balance):.3f} ({max(balance):.3f})",
            "/".join(str(heads) for heads in sorted({one.heads for one in of})),
            max(one.hops for one in of),
            f"{np.mean([one.moved for one in of]):.3f}",
            f"{np.mean(calls):.0f} ({max(calls)})",
            " / ".join(f"{time:.0f}" for time in cpu[:3]),
        ]
        yield "| " + " | ".join(map(str, columns)) + " |"


def _pair(shares):
    return " ".join(f"{share:.2f}" for share in shares)
