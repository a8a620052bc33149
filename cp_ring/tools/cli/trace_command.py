"""`cp-ring trace`: what a trace shows, as tables, and one of its calls as a picture: what its hops
would take if all ranks and links were alike, and what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from cp_ring.errors import ConfigError
from cp_ring.plan.costs.simulate import Pass, in_turn, neighbors
from cp_ring.tools.cli.option_models import WRITTEN, AsJson
from cp_ring.tools.cli.terminal import emit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RED = "#d62728"
_KINDS = {"hop": "compute", "wait": "wait", "received message": "message"}

Work = dict[tuple[int, int], int]
"""The pairs of queries and keys of each (rank, hop)."""
Sizes = dict[tuple[int, int, int], int]
"""The bytes of each (hop, sender, receiver)."""


def trace_command(
    file: Annotated[
        Path,
        typer.Argument(help="A trace-STEP.json that --cp-ring-trace has written.", metavar="FILE"),
    ],
    draw: Annotated[
        str | None,
        typer.Option(
            help="Draw a call, measured beside predicted, to a .png, .svg or .pdf file.",
            **WRITTEN,
        ),
    ] = None,
    call: Annotated[int, typer.Option(min=0, help="Which forward call to draw, from 0.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Summarize a trace of --cp-ring-trace: hops, waits, messages, ranks; and draw one of its
    calls.
    """
    from cp_ring.observe import trace  # imports torch

    recorded = trace.read(file)
    facts = summary(recorded)
    emit(facts, as_json, lambda: _show(facts))
    if draw:
        draw_call(recorded, draw, call)
        typer.echo(f"wrote {draw}", err=as_json)


def _slices(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in recorded["traceEvents"] if event["ph"] == "X"]


def summary(recorded: dict[str, Any]) -> dict[str, Any]:
    """Computation and waiting by hop and by rank, mean milliseconds of a rank; the slowest
    messages.
    """
    slices = _slices(recorded)
    ranks = sorted({event["pid"] for event in slices})
    hops: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(
        lambda: {"compute_ms": 0.0, "wait_ms": 0.0}
    )
    each = {rank: {"rank": rank, "compute_ms": 0.0, "wait_ms": 0.0, "calls": 0} for rank in ranks}
    for event in slices:
        rank, args, ms = event["pid"], event["args"], event["dur"] / 1e3
        if event["cat"] in ("hop", "wait"):
            kind = f"{_KINDS[event['cat']]}_ms"
            hops[args["direction"], args["hop"]][kind] += ms / len(ranks)
            each[rank][kind] += ms
        each[rank]["calls"] += event["cat"] == "call"
    received = [event for event in slices if event["cat"] == "received message"]
    worst = sorted(received, key=lambda event: -event["args"]["waited_us"])[:5]
    return {
        **recorded["otherData"],
        "messages": len(received),
        "hops": [
            _rounded({"direction": direction, "hop": hop, **times})
            for (direction, hop), times in sorted(hops.items())
        ],
        "ranks": [*map(_rounded, each.values())],
        "longest_waits": [
            {
                "name": event["name"],
                "direction": event["args"]["direction"],
                "from": event["args"]["peer"],
                "to": event["pid"],
                "bytes": event["args"]["bytes"],
                "wait_ms": round(event["args"]["waited_us"] / 1e3, 3),
            }
            for event in worst
        ],
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in values.items()
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, ranks = Console(), facts["ranks"]
    steps = ", ".join(map(str, facts["steps"]))
    compute, wait = (
        sum(times[name] for times in ranks) / len(ranks) for name in ("compute_ms", "wait_ms")
    )
    console.print(
        f"step {steps}: {len(ranks)} ranks, {facts['messages']} messages; a rank computes "
        f"{compute:.1f} ms and waits {wait:.1f} ms ({wait / (compute + wait or 1):.1%}); clocks "
        f"agree to {facts['clock_error_us']:g} us",
        soft_wrap=True,
    )
    for title, entries in (
        ("hops, mean of the ranks", facts["hops"]),
        ("ranks", ranks),
        ("longest waits", facts["longest_waits"]),
    ):
        if entries:
            table = Table(*entries[0], title=title)
            for entry in entries:
                table.add_row(*map(str, entry.values()))
            console.print(table)


class Bar(NamedTuple):
    """A computation, a wait or an arriving message of a rank, from `begin` to `end` in
    milliseconds.
    """

    kind: str
    rank: int
    hop: int
    begin: float
    end: float


def draw_call(recorded: dict[str, Any], path: str, call: int) -> None:
    """Writes the picture of forward call number `call`. Raises `ConfigError` where the trace has no
    such call.
    """
    from cp_ring.tools.cli.drawing import INK, picture

    measured, work, sizes = measured_bars(recorded, call)
    predicted = predicted_bars(work, sizes, *_rates(measured, work, sizes))
    end = max(bar.end for bar in measured + predicted)
    with picture(path, 15, max(3.0, 0.7 * len({bar.rank for bar in measured}) + 2)) as figure:
        left, right = figure.subplots(1, 2)
        _draw(left, predicted, end, "predicted: every rank and link at the median speed")
        _draw(right, measured, end, "measured")
        figure.suptitle(
            f"forward call {call} of step {recorded['otherData']['steps'][0]}: computation "
            "(solid), waiting (red), arriving messages (hatched); the color is the rank, paler at "
            "later hops",
            fontsize=12,
            color=INK,
        )


def measured_bars(recorded: dict[str, Any], call: int) -> tuple[list[Bar], Work, Sizes]:
    """The bars of a call, the pairs that are computed, and the bytes that are received."""
    slices = [event for event in _slices(recorded) if event["args"]["direction"] == "forward"]
    calls: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in slices:
        calls[event["pid"]] += [event] * (event["cat"] == "call")
    for rank in sorted({event["pid"] for event in _slices(recorded)}):
        if call >= len(calls[rank]):
            raise ConfigError(
                f"--call {call}: the trace has {len(calls[rank])} forward calls of rank {rank}"
            )
    zero = min(of_rank[call]["ts"] for of_rank in calls.values())
    bars, work, sizes = [], {}, {}
    for event in slices:
        rank, args, begin, end = (
            event["pid"],
            event["args"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        whole = calls[rank][call]
        inside = whole["ts"] - 1e-3 <= begin and end <= whole["ts"] + whole["dur"] + 1e-3
        if event["cat"] not in _KINDS or not inside:
            continue
        kind, hop = _KINDS[event["cat"]], args["hop"]
        bars.append(Bar(kind, rank, hop, (begin - zero) / 1e3, (end - zero) / 1e3))
        if kind == "compute":
            work[rank, hop] = args["pairs"]
        elif kind == "message":
            sizes[hop, args["peer"], rank] = args["bytes"]
    return bars, work, sizes


def _rates(bars: list[Bar], work: Work, sizes: Sizes) -> tuple[float, float]:
    """Median milliseconds of a pair, and of a byte."""
    pair = [
        (bar.end - bar.begin) / work[bar.rank, bar.hop]
        for bar in bars
        if bar.kind == "compute" and work[bar.rank, bar.hop]
    ]
    total: defaultdict[tuple[int, int], int] = defaultdict(int)
    for (hop, _, receiver), size in sizes.items():
        total[receiver, hop] += size
    edges: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for bar in bars:
        if bar.kind == "message":
            edges[bar.rank, bar.hop] += [bar.begin, bar.end]
    byte = [(max(times) - min(times)) / total[key] for key, times in edges.items() if total[key]]
    return median(pair or [0.0]), median(byte or [0.0])


def predicted_bars(work: Work, sizes: Sizes, pair: float, byte: float) -> list[Bar]:
    """The same call where a pair and a byte take so many milliseconds everywhere, as
    `cp_ring.plan.costs.simulate` counts.
    """
    ranks = sorted({rank for rank, _ in work} | {rank for _, *ends in sizes for rank in ends})
    hops = 1 + max(hop for hop in [0, *(hop for _, hop in work), *(hop for hop, _, _ in sizes)])
    compute = np.zeros((len(ranks), hops))
    moved = np.zeros((2, len(ranks), hops))
    for (rank, hop), pairs in work.items():
        compute[ranks.index(rank), hop] = pairs * pair
    messages = sorted(sizes)
    seconds = np.array([sizes[key] * byte for key in messages])
    of_hop, sender, receiver = (
        np.array([(hop, *map(ranks.index, ends)) for hop, *ends in messages], np.int64)
        .reshape(-1, 3)
        .T
    )
    for which, end_of in enumerate((receiver, sender)):
        np.add.at(moved[which], (end_of, of_hop), seconds)
    before, _ = neighbors((compute > 0) | (moved.sum(0) > 0))
    moving = np.zeros_like(compute)
    for hop in range(1, hops):
        moving[np.arange(len(ranks)), before[:, hop]] += moved[:, :, hop].max(0)
    forward = Pass(compute, moving)
    ready = forward.begin[receiver, before[receiver, of_hop]]
    start = in_turn(ready, receiver * hops + of_hop, seconds)
    bars = [
        Bar("message", rank, hop, begin, begin + took)
        for (hop, _, rank), begin, took in zip(
            messages, start.tolist(), seconds.tolist(), strict=True
        )
    ]
    for (place, hop), begin in np.ndenumerate(forward.begin):
        if (ranks[place], hop) in work:
            done, end = begin + compute[place, hop], begin + forward.stages[place, hop]
            bars.append(Bar("compute", ranks[place], hop, float(begin), float(done)))
            if end > done:
                bars.append(Bar("wait", ranks[place], hop, float(done), float(end)))
    return bars


def _draw(axes: Axes, bars: list[Bar], end: float, title: str) -> None:
    from cp_ring.tools.cli.drawing import INK, add_bars, color

    ranks = sorted({bar.rank for bar in bars})
    hops = max(bar.hop for bar in bars) + 1
    look = {
        "compute": (-0.38, 0.5, None, None),
        "wait": (-0.38, 0.5, None, 0.45),
        "message": (0.16, 0.2, "////", None),
    }
    for kind, (offset, height, hatch, alpha) in look.items():
        shown: list[tuple[float, float, float, Any]] = []
        for bar in bars:
            if bar.kind == kind:
                place = ranks.index(bar.rank)
                fill = _RED if kind == "wait" else color(place, bar.hop, len(ranks), hops)
                shown.append((bar.begin, bar.end, place + offset, fill))
        add_bars(axes, shown, height, edgecolors="white", linewidths=0.4, hatch=hatch, alpha=alpha)
    finish = max(bar.end for bar in bars if bar.kind != "message")
    computed = sum(bar.end - bar.begin for bar in bars if bar.kind == "compute")
    busy = computed / len(ranks) / (finish or 1)
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(len(ranks) - 0.4, -0.6), xlabel="ms", ylabel="rank")
    axes.set_yticks(range(len(ranks)), [*map(str, ranks)])
    axes.set_title(f"{title}: {finish:.2f} ms, {busy:.0%} of it computing", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
