"""A call of a trace as a picture: what its hops would take if all ranks and links were alike, and
what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cp_ring.errors import ConfigError
from cp_ring.plan.costs.simulate import Pass, in_turn, neighbors
from cp_ring.tools.cli.drawing import INK, add_bars, color, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_RED = "#d62728"


class Bar(NamedTuple):
    """A computation, a wait or an arriving message of a rank, from `begin` to `end` in
    milliseconds.
    """

    kind: str
    rank: int
    hop: int
    begin: float
    end: float


def draw(found: dict[str, Any], path: str, call: int) -> None:
    """Writes the picture of forward call number `call`. Raises `ConfigError` where the trace has no
    such call.
    """
    measured, work, sizes = measured_bars(found, call)
    predicted = predicted_bars(work, sizes, *_rates(measured, work, sizes))
    end = max(bar.end for bar in measured + predicted)
    with picture(path, 15, max(3.0, 0.7 * len({bar.rank for bar in measured}) + 2)) as figure:
        left, right = figure.subplots(1, 2)
        _draw(left, predicted, end, "predicted: every rank and link at the median speed")
        _draw(right, measured, end, "measured")
        figure.suptitle(
            f"forward call {call} of step {found['otherData']['steps'][0]}: computation (solid), "
            "waiting (red), arriving messages (hatched); the color is the rank, paler at later "
            "hops",
            fontsize=12,
            color=INK,
        )


def measured_bars(
    found: dict[str, Any], call: int
) -> tuple[list[Bar], dict[tuple[int, int], int], dict[tuple[int, int, int], int]]:
    """The bars of a call, the pairs of each (rank, hop), and the bytes of each (hop, sender,
    receiver).
    """
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    spans = {}
    for rank in sorted({event["pid"] for event in slices}):
        calls = [
            e
            for e in slices
            if e["pid"] == rank and e["cat"] == "call" and e["args"]["direction"] == "forward"
        ]
        if call >= len(calls):
            raise ConfigError(
                f"--call {call}: the trace has {len(calls)} forward calls of rank {rank}"
            )
        spans[rank] = calls[call]["ts"], calls[call]["ts"] + calls[call]["dur"]
    zero = min(begin for begin, _ in spans.values())
    bars, work, sizes = [], {}, {}
    for event in slices:
        begin, end = spans[event["pid"]]
        kind = {"hop": "compute", "wait": "wait", "received message": "message"}.get(event["cat"])
        inside = begin - 1e-3 <= event["ts"] and event["ts"] + event["dur"] <= end + 1e-3
        if kind is None or not inside or event["args"]["direction"] != "forward":
            continue
        hop = event["args"]["hop"]
        bars.append(
            Bar(
                kind,
                event["pid"],
                hop,
                (event["ts"] - zero) / 1e3,
                (event["ts"] + event["dur"] - zero) / 1e3,
            )
        )
        if kind == "compute":
            work[event["pid"], hop] = event["args"]["pairs"]
        elif kind == "message":
            sizes[hop, event["args"]["peer"], event["pid"]] = event["args"]["bytes"]
    return bars, work, sizes


def _rates(
    bars: list[Bar], work: dict[tuple[int, int], int], sizes: dict[tuple[int, int, int], int]
) -> tuple[float, float]:
    """Median milliseconds of a pair, and of a byte."""
    pair = [
        (bar.end - bar.begin) / work[bar.rank, bar.hop]
        for bar in bars
        if bar.kind == "compute" and work[bar.rank, bar.hop]
    ]
    total: defaultdict[tuple[int, int], int] = defaultdict(int)
    for (hop, _, receiver), size in sizes.items():
        total[receiver, hop] += size
    took: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for bar in bars:
        if bar.kind == "message":
            took[bar.rank, bar.hop] += [bar.begin, bar.end]
    byte = [(max(times) - min(times)) / total[key] for key, times in took.items() if total[key]]
    return median(pair or [0.0]), median(byte or [0.0])


def predicted_bars(
    work: dict[tuple[int, int], int],
    sizes: dict[tuple[int, int, int], int],
    pair: float,
    byte: float,
) -> list[Bar]:
    """The same call where a pair and a byte take so many milliseconds everywhere, as
    `cp_ring.plan.costs.simulate` counts.
    """
    ranks = sorted({rank for rank, _ in work} | {rank for _, *ends in sizes for rank in ends})
    hops = 1 + max(hop for hop in [0, *(hop for _, hop in work), *(hop for hop, _, _ in sizes)])
    compute = np.zeros((len(ranks), hops))
    moved = np.zeros((2, len(ranks), hops))
    for (of_rank, at), pairs in work.items():
        compute[ranks.index(of_rank), at] = pairs * pair
    messages = [
        (hop, ranks.index(sender), ranks.index(receiver)) for hop, sender, receiver in sorted(sizes)
    ]
    seconds = np.array([sizes[key] * byte for key in sorted(sizes)])
    hop, sender, receiver = np.array(messages, np.int64).reshape(-1, 3).T
    for which, end_of in enumerate((receiver, sender)):
        np.add.at(moved[which], (end_of, hop), seconds)
    before, _ = neighbors((compute > 0) | (moved.sum(0) > 0))
    moving = np.zeros_like(compute)
    for index in range(1, hops):
        moving[np.arange(len(ranks)), before[:, index]] += moved[:, :, index].max(0)
    forward = Pass(compute, moving)
    start = in_turn(forward.begin[receiver, before[receiver, hop]], receiver * hops + hop, seconds)
    bars = [
        Bar("message", ranks[rank], at, begin, begin + took)
        for rank, at, begin, took in zip(
            receiver.tolist(), hop.tolist(), start.tolist(), seconds.tolist(), strict=True
        )
    ]
    for (rank, index), begin in np.ndenumerate(forward.begin):
        if (ranks[rank], index) in work:
            done, end = begin + compute[rank, index], begin + forward.stages[rank, index]
            bars.append(Bar("compute", ranks[rank], index, float(begin), float(done)))
            if end > done:
                bars.append(Bar("wait", ranks[rank], index, float(done), float(end)))
    return bars


def _draw(axes: Axes, bars: list[Bar], end: float, title: str) -> None:
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
    busy = (
        sum(bar.end - bar.begin for bar in bars if bar.kind == "compute")
        / len(ranks)
        / (finish or 1)
    )
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(len(ranks) - 0.4, -0.6), xlabel="ms", ylabel="rank")
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_title(f"{title}: {finish:.2f} ms, {busy:.0%} of it computing", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
