"""A plan as a picture: the score matrix colored by rank and hop, and the predicted timeline of its
hops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from cp_ring.errors import PlanError
from cp_ring.plan.plan import Plan
from cp_ring.plan.shard_tiles import tiles_in_stream
from cp_ring.plan.tiles import Tile
from cp_ring.plan.time import Conditions, PassTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cp_ring.plan.records import PlanTables

Color = tuple[float, float, float]

MAX_LEGEND = 16
"""Ranks that are told apart by hop numbers, paler colors at later hops, and a legend."""

INK, FAINT, _IDLE = "#22272e", "#6b7280", "#e5e7eb"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")


def draw(whole: Plan, path: str, given: Conditions | None = None) -> None:
    """Write the picture of a plan to `path`: PNG, SVG or PDF by its ending. Text stays text in SVG
    and PDF. The time is predicted for `given`.

    Raises `PlanError` where matplotlib does not know the ending, or the file cannot be written.
    """
    plan, report = whole.ring, whole.verify()
    time, rates = whole.time(given), (given or Conditions()).rates
    assumed = (
        f"{rates.forward / 1e12:g} TFLOP/s a rank, {rates.inside / 1e9:g} GB/s inside a node, "
        f"{rates.between / 1e9:g} GB/s between nodes"
    )
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        figure = Figure(figsize=(15.0, 7.8), layout="constrained", facecolor="white")
        scores, timeline = figure.subplots(1, 2, width_ratios=(1, 1.15))
        _draw_scores(scores, plan)
        _draw_timeline(timeline, plan, time.there)
        timeline.set_xlabel(f"time of one layer's forward pass (ms)\npredicted at {assumed}")
        figure.suptitle(
            f"{plan.mask.describe()}; {plan.mask.n:,} tokens on {plan.cp} ranks; "
            f"{plan.layout.name} layout, {plan.route} route, {plan.schedule[-1]} remote hops\n"
            f"balance {report.balance:.3f} (max / mean work), "
            f"{report.share_of_full_ring:.1%} of a full ring on the wire",
            fontsize=13,
            color=INK,
        )
        if plan.cp <= MAX_LEGEND:
            handles = [
                Patch(color=color(rank, 0, plan.cp, 1), label=f"rank {rank}")
                for rank in range(plan.cp)
            ]
            columns = min(plan.cp, 8)
            figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        try:
            figure.savefig(path, dpi=140)
        except (OSError, ValueError) as error:
            raise PlanError(f"--draw {path}: cannot write: {error}") from None


def color(rank: int, hop: int, cp: int, hops: int) -> Color:
    """Return the color of a rank at a hop, paler at later hops of up to `MAX_LEGEND` ranks.

    Up to 8 ranks have colors that readers with a color vision deficiency tell apart (after Okabe
    and Ito, https://jfly.uni-koeln.de/color, and Tol, https://sronpersonalpages.nl/~pault); more
    ranks have a color of a scale that is also one of brightness.
    """
    scale = matplotlib.colormaps["viridis"]
    base = to_rgb(COLORS[rank]) if cp <= len(COLORS) else scale(0.9 * rank / (cp - 1))[:3]
    fade = 0.65 * hop / max(hops - 1, 1) * (cp <= MAX_LEGEND)
    red, green, blue = (part + (1 - part) * fade for part in base)
    return red, green, blue


def _ink(background: Color) -> str:
    """Return a color for text that can be read on the background."""
    red, green, blue = background
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK


def _draw_scores(axes: Axes, plan: PlanTables) -> None:
    """Draw the score matrix: queries from top to bottom, keys from left to right. A tile has the
    color of its rank and hop.
    """
    tiles, *places_of = tiles_in_stream(plan)
    places = zip(*(numbers.tolist() for numbers in places_of), strict=True)
    few, hops, n = plan.cp <= MAX_LEGEND, plan.schedule[-1] + 1, plan.mask.n
    shapes, fills = [_outline(tile) for tile in tiles], []
    for shape, (rank, hop), area in zip(shapes, places, tiles.area().tolist(), strict=True):
        fills.append(color(rank, hop, plan.cp, hops))
        if few and plan.cp > 1 and area**0.5 > n / 40:
            x, y = np.unique(shape, axis=0).mean(0)
            _label(axes, x, y, hop, fills[-1])
    edge = 0.6 if len(shapes) <= 600 and few else 0.0
    axes.add_collection(
        PolyCollection(shapes, facecolors=fills, edgecolors="white", linewidths=edge)
    )
    axes.set(
        xlim=(0, n),
        ylim=(n, 0),
        aspect="equal",
        xlabel="key position",
        ylabel="query position",
    )
    numbers = ", and at which hop (number)" * few
    _set_frame(axes, f"which rank computes which pairs{numbers}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(n // 8, 1)))
        axis.set_major_formatter(tokens_of)


def _outline(tile: Tile) -> list[tuple[int, int]]:
    """Return the corners (key, query) of the area that a tile allows."""
    q0, q1, k0, k1, lo, hi = tile
    corners = sorted({q0, q1, *(query for query in (k0 - lo, k1 - hi) if q0 < query < q1)})
    left = [(max(k0, query + lo), query) for query in corners]
    right = [(min(k1, query + hi), query) for query in corners]
    return left + right[::-1]


def _draw_timeline(axes: Axes, plan: PlanTables, time: PassTime) -> None:
    """Draw one lane for each rank: above, the computation of its hops and its idle time; below, the
    keys and values that move meanwhile.
    """
    few, hops = plan.cp <= MAX_LEGEND, plan.schedule[-1] + 1
    stages, compute, moving = (1e3 * table for table in (time.stages, time.compute, time.moving))
    begin = np.cumsum(stages, 1) - stages
    end = float(stages.sum(1).max())
    idle = [(0.0, end, rank - 0.38, _IDLE) for rank in range(plan.cp)]
    _add_bars(axes, idle, 0.5, linewidths=0)
    computed: list[tuple[float, float, float, Color]] = []
    moved: list[tuple[float, float, float, Color]] = []
    for (rank, stage), start in np.ndenumerate(begin):
        for bars, seconds, later, top in ((computed, compute, 0, -0.38), (moved, moving, 1, 0.16)):
            length = float(seconds[rank, stage])
            if length:  # keys have the color of the computation that waits for them
                hop = int(time.hops[rank, min(stage + later, stages.shape[1] - 1)])
                fill = color(rank, hop, plan.cp, hops)
                bars.append((start, start + length, rank + top, fill))
                if few and not later and length > end / 40:
                    _label(axes, start + length / 2, rank - 0.13, hop, fill)
    line = 0.5 * few
    _add_bars(axes, computed, 0.5, edgecolors="white", linewidths=line)
    hatch = "////" if few else None
    _add_bars(axes, moved, 0.2, edgecolors="white", linewidths=line, hatch=hatch)
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(plan.cp - 0.4, -0.6), ylabel="rank")
    axes.set_yticks(range(0, plan.cp, 1 if plan.cp <= 32 else plan.cp // 16))
    busy = compute.sum() / (plan.cp * end or 1)
    keys = f"keys on the wire ({'hatched' if few else 'thin'})"
    _set_frame(
        axes, f"when: computation, {keys}, idle time (gray); ranks compute {busy:.0%} of the time"
    )


def _add_bars(
    axes: Axes, bars: list[tuple[float, float, float, Any]], height: float, **look: Any
) -> None:
    """Draw bars (begin, end, top, color); `look` has further arguments of the collection."""
    shapes = [
        [(begin, top), (end, top), (end, top + height), (begin, top + height)]
        for begin, end, top, _ in bars
    ]
    axes.add_collection(PolyCollection(shapes, facecolors=[bar[3] for bar in bars], **look))


def _label(axes: Axes, x: float, y: float, hop: int, fill: Color) -> None:
    axes.text(x, y, str(hop), ha="center", va="center", fontsize=8, color=_ink(fill))


def _set_frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def tokens_of(value: float, _: float = 0) -> str:
    """Return the label of a tick."""
    if value >= 1024 and value % 256 == 0:
        return f"{value / 1024:,g}K"
    return f"{value:,.0f}"
