"""A plan as a picture: the score matrix colored by rank and hop, and the predicted timeline of its hops."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

import numpy as np

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.cost import AttentionSizes, Span, cost, timeline
from cp_ring.plan.rates import RATES, Rates
from cp_ring.plan.tiles import Tile
from cp_ring.plan.verify import Report, tiles_in_stream

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ModuleNotFoundError:
    raise ConfigError("drawing a plan needs matplotlib: pip install 'cp-ring[draw]'") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cp_ring.plan.ring_plan import RingPlan

Color = tuple[float, float, float]

MAX_LEGEND = 16
INK, FAINT = "#22272e", "#8b949e"


def draw(
    plan: RingPlan,
    path: str,
    report: Report | None = None,
    sizes: AttentionSizes | None = None,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
) -> None:
    """Writes the picture to `path`, as PNG, SVG or PDF by its ending.

    `report` is by default the result of `plan.verify`. `sizes`, `rates` and `ranks_per_node` are those of the predicted timeline.
    Raises `PlanError` where the ending is another one, or the file cannot be written.
    """
    check_ending(path)
    report = report or plan.verify(num_slots=plan.cp)
    figure = Figure(figsize=(15, 7.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_scores(left, plan)
    spans = timeline(plan, cost(report, sizes or AttentionSizes()), rates, ranks_per_node)
    _draw_timeline(right, plan, *spans)
    figure.suptitle(
        f"{plan.mask.describe()}; {plan.layout.name} layout, {plan.route} route: {plan.n:,} tokens on {plan.cp} ranks, "
        f"{plan.schedule[-1]} remote hops\n"
        f"balance {report.balance:.3f} (max / mean work), {report.share_of_full_ring:.1%} of a full ring on the wire",
        fontsize=13, color=INK,
    )  # fmt: skip
    handles = [Patch(color=color(rank, 0, plan.cp, 1), label=f"rank {rank}") for rank in range(min(plan.cp, MAX_LEGEND))]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(plan.cp, 8), frameon=False, fontsize=10)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise PlanError(f"--draw {path}: cannot write: {error.strerror}") from None


def check_ending(path: str) -> None:
    """Raises `PlanError` unless `path` ends in .png, .svg or .pdf."""
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise PlanError(f"--draw {path}: the file must end in .png, .svg or .pdf")


def color(rank: int, hop: int, cp: int, hops: int) -> Color:
    """The color of a rank at a hop: a hue for each rank, paler at later hops."""
    hue = (0.58 + rank / max(cp, 1)) % 1.0
    fade = hop / max(hops - 1, 1)
    return colorsys.hls_to_rgb(hue, 0.42 + 0.42 * fade, 0.62 - 0.12 * fade)


def _draw_scores(axes: Axes, plan: RingPlan) -> None:
    """The score matrix: queries from top to bottom, keys from left to right. A tile has the color of its rank and hop."""
    tiles, parent = tiles_in_stream(plan)
    rank, hop = plan.tile_rank[parent], plan.tile_hop[parent]
    shapes = [_outline(tile) for tile in tiles]
    hops = plan.schedule[-1] + 1
    colors = [color(r, h, plan.cp, hops) for r, h in zip(rank.tolist(), hop.tolist(), strict=True)]
    edge = 0.6 if len(shapes) <= 600 else 0.0
    axes.add_collection(PolyCollection(shapes, facecolors=colors, edgecolors="white", linewidths=edge))
    for shape, one, area in zip(shapes, hop.tolist(), tiles.area().tolist(), strict=True):
        if plan.cp > 1 and area**0.5 > plan.n / 40:
            x, y = _center(np.array(shape))
            axes.text(x, y, str(one), ha="center", va="center", fontsize=8, color="white" if one < hops / 2 else INK)
    axes.set(xlim=(0, plan.n), ylim=(plan.n, 0), aspect="equal", xlabel="key position", ylabel="query position")
    axes.set_title("which rank computes which pairs, and at which hop (number)", fontsize=11, color=INK)
    _set_frame(axes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(plan.n // 8, 1)))
        axis.set_major_formatter(FuncFormatter(_tokens))


def _center(shape: np.ndarray) -> tuple[float, float]:
    """Center of gravity of a polygon [points, 2]."""
    x, y = shape.T
    cross = x * np.roll(y, -1) - np.roll(x, -1) * y
    area = cross.sum() / 2
    if abs(area) < 1e-9:
        return float(x.mean()), float(y.mean())
    return float(((x + np.roll(x, -1)) * cross).sum() / (6 * area)), float(((y + np.roll(y, -1)) * cross).sum() / (6 * area))


def _outline(tile: Tile) -> list[tuple[int, int]]:
    """Corners (key, query) of the area that a tile allows."""
    q0, q1, k0, k1, lo, hi = tile
    corners = sorted({q0, q1, *(query for query in (k0 - lo, k1 - hi) if q0 < query < q1)})
    left = [(max(k0, query + lo), query) for query in corners]
    right = [(min(k1, query + hi), query) for query in corners]
    return left + right[::-1]


def _draw_timeline(axes: Axes, plan: RingPlan, compute: list[Span], transfers: list[Span]) -> None:
    """One lane per rank: above, the computation of its hops; below, the keys and values that it receives."""
    for spans, offset, height in ((compute, -0.38, 0.5), (transfers, 0.16, 0.2)):
        shapes, colors = [], []
        for span in spans:
            # A transfer has the color of the computation that waits for it.
            low, high, top = span.start * 1e3, span.end * 1e3, span.rank + offset
            shapes.append([(low, top), (high, top), (high, top + height), (low, top + height)])
            colors.append(color(span.rank, span.hop, plan.cp, plan.schedule[-1] + 1))
        hatch = "////" if height < 0.4 else None
        axes.add_collection(PolyCollection(shapes, facecolors=colors, edgecolors="white", linewidths=0.5, hatch=hatch))
    _label_hops(axes, compute, plan.cp, plan.schedule[-1] + 1)
    end = max((span.end for span in compute + transfers), default=0.0) * 1e3
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(plan.cp - 0.4, -0.6), xlabel="time of one layer's forward pass (ms), predicted")
    axes.set_yticks(range(plan.cp) if plan.cp <= 32 else range(0, plan.cp, plan.cp // 16))
    axes.set_ylabel("rank")
    axes.set_title("when: computation (solid) and arriving keys (hatched)", fontsize=11, color=INK)
    _set_frame(axes)


def _label_hops(axes: Axes, compute: list[Span], cp: int, hops: int) -> None:
    total = max((span.end for span in compute), default=0.0)
    for span in compute:
        if cp <= 16 and span.end - span.start > total / 40:
            ink = "white" if span.hop < hops / 2 else INK
            x = (span.start + span.end) / 2 * 1e3
            axes.text(x, span.rank - 0.13, str(span.hop), ha="center", va="center", fontsize=8, color=ink)


def _set_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def _tokens(value: float, _: int | None = None) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 256 == 0 else f"{value:,.0f}"
