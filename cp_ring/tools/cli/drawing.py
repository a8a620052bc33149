"""A plan as a picture: the score matrix colored by rank and hop, and the predicted timeline of its
hops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs.simulate import Span, spans
from cp_ring.plan.mask import Mask
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.tiles import Tile
from cp_ring.plan.verify import Report, tiles_in_stream

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ModuleNotFoundError:
    raise ConfigError("drawing a plan needs matplotlib: pip install 'cp-ring[draw]'") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cp_ring.plan.plan import Plan
    from cp_ring.plan.tables import PlanTables

Color = tuple[float, float, float]

MAX_LEGEND = 16
INK, FAINT, _IDLE = "#22272e", "#6b7280", "#e5e7eb"
_OKABE_ITO = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#f0e442",
)
_SCALE = "viridis"


def draw(
    plan: Plan,
    path: str,
    report: Report | None = None,
    sizes: AttentionSizes | None = None,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
    panel: str = "both",
    width: float = 15.0,
) -> None:
    """Writes the picture to `path`, as PNG, SVG or PDF by its ending.

    `report` is by default the result of `plan.verify`. `sizes`, `rates` and `ranks_per_node` are
    those of the predicted timeline. `panel` is `left` (the score matrix), `right` (the timeline) or
    `both`; `width` is in inches. Text stays text in SVG and PDF. Raises `PlanError` where the
    ending is another one, an option has no such value, or the file cannot be written.
    """
    check_ending(path)
    check_panel(panel, width)
    report, sizes, ring = (
        report or plan.verify(num_slots=plan.cp),
        sizes or AttentionSizes(),
        plan.ring,
    )
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        figure = Figure(
            figsize=(width, width * (0.52 if panel == "both" else 0.85)),
            layout="constrained",
            facecolor="white",
        )
        FigureCanvasAgg(figure)
        panels = (
            figure.subplots(1, 2, width_ratios=(1, 1.15))
            if panel == "both"
            else [figure.subplots()] * 2
        )
        if panel != "right":
            _draw_scores(panels[0], ring)
        if panel != "left":
            _draw_timeline(panels[1], ring, *spans(ring, report, sizes, rates, ranks_per_node))
            panels[1].set_xlabel(
                f"time of one layer's forward pass (ms)\n{_caption(rates, ranks_per_node)}"
            )
        figure.suptitle(_title(ring, report, sizes, panel == "both"), fontsize=13, color=INK)
        if ring.cp <= MAX_LEGEND:
            handles = [
                Patch(color=color(rank, 0, ring.cp, 1), label=f"rank {rank}")
                for rank in range(ring.cp)
            ]
            figure.legend(
                handles=handles,
                loc="outside lower center",
                ncols=min(ring.cp, 8),
                frameon=False,
                fontsize=10,
            )
        else:
            scale = ScalarMappable(Normalize(0, ring.cp - 1), matplotlib.colormaps[_SCALE])
            figure.colorbar(
                scale,
                ax=panels if panel == "both" else panels[0],
                label="rank",
                shrink=0.6,
                pad=0.01,
            )
        try:
            figure.savefig(path, dpi=140)
        except OSError as error:
            raise PlanError(f"--draw {path}: cannot write: {error.strerror}") from None


def check_panel(panel: str, width: float) -> None:
    """Raises `PlanError` for another panel than left, right and both, or a width that is no
    picture's.
    """
    if panel not in ("left", "right", "both"):
        raise PlanError(f"--panel {panel!r}: it must be left, right or both")
    if not 2 <= width <= 60:
        raise PlanError(f"--width {width:g}: it must be a number of inches from 2 to 60")


def _title(plan: PlanTables, report: Report, sizes: AttentionSizes, wide: bool) -> str:
    heads = f"{sizes.heads} heads, {sizes.kv_heads} for keys and values, of {sizes.head_dim}, {sizes.dtype}"
    codec = "" if sizes.codec.plain else f", which travels as {sizes.wire}"
    facts = (
        f"{plan.mask.describe()}; {heads}",
        f"{plan.n:,} tokens on {plan.cp} ranks; {plan.layout.name} layout, {plan.route} route, "
        f"{plan.schedule[-1]} remote hops",
        f"balance {report.balance:.3f} (max / mean work), {report.share_of_full_ring:.1%} of a "
        f"full ring on the wire{codec}",
    )
    return f"{facts[0]}; {facts[1]}\n{facts[2]}" if wide else "\n".join(facts)


def _caption(rates: Rates, ranks_per_node: int) -> str:
    links = (
        f"{rates.inside / 1e9:g} GB/s inside a node of {ranks_per_node}, "
        if ranks_per_node > 1
        else ""
    )
    between = f"{rates.between / 1e9:g} GB/s between nodes"
    return f"predicted, not measured, at {rates.flops / 1e12:g} TFLOP/s a rank, {links}{between}"


def check_ending(path: str) -> None:
    """Raises `PlanError` unless `path` ends in .png, .svg or .pdf."""
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise PlanError(f"--draw {path}: the file must end in .png, .svg or .pdf")


def color(rank: int, hop: int, cp: int, hops: int) -> Color:
    """The color of a rank at a hop, paler at later hops.

    Up to 8 ranks have colors that readers with a color vision deficiency tell apart (Okabe and Ito,
    https://jfly.uni-koeln.de/color); more ranks have a color of a scale that is also one of
    brightness.
    """
    base = (
        to_rgb(_OKABE_ITO[rank])
        if cp <= len(_OKABE_ITO)
        else matplotlib.colormaps[_SCALE](rank / (cp - 1))[:3]
    )
    fade = 0.65 * hop / max(hops - 1, 1)
    red, green, blue = (part + (1 - part) * fade for part in base)
    return red, green, blue


def _ink(background: Color) -> str:
    """A color for text that can be read on the background."""
    red, green, blue = background
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else INK


def _draw_scores(axes: Axes, plan: PlanTables) -> None:
    """The score matrix: queries from top to bottom, keys from left to right. A tile has the color
    of its rank and hop.
    """
    tiles, parent = tiles_in_stream(plan)
    rank, hop = plan.tile_rank[parent], plan.tile_hop[parent]
    shapes = [_outline(tile) for tile in tiles]
    hops = plan.schedule[-1] + 1
    colors = [color(r, h, plan.cp, hops) for r, h in zip(rank.tolist(), hop.tolist(), strict=True)]
    edge = 0.6 if len(shapes) <= 600 and plan.cp <= MAX_LEGEND else 0.0
    axes.add_collection(
        PolyCollection(shapes, facecolors=colors, edgecolors="white", linewidths=edge)
    )
    if (region := zoomed(plan.mask)) is not None:
        _draw_inset(axes, shapes, colors, region)
    for shape, one, area, fill in zip(
        shapes, hop.tolist(), tiles.area().tolist(), colors, strict=True
    ):
        if plan.cp > 1 and area**0.5 > plan.n / 40:
            x, y = _center(np.array(shape))
            axes.text(x, y, str(one), ha="center", va="center", fontsize=8, color=_ink(fill))
    axes.set(
        xlim=(0, plan.n),
        ylim=(plan.n, 0),
        aspect="equal",
        xlabel="key position",
        ylabel="query position",
    )
    axes.set_title(
        "which rank computes which pairs, and at which hop (number)", fontsize=11, color=INK
    )
    _set_frame(axes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(plan.n // 8, 1)))
        axis.set_major_formatter(FuncFormatter(_tokens))


def zoomed(mask: Mask) -> tuple[int, int] | None:
    """The tokens of the four documents in the middle, to be drawn larger; None where documents are
    few, or none.
    """
    if mask.name != "documents" or mask.segments is None:
        return None
    starts = [*mask.segments[0].tolist(), mask.n]
    middle = (len(starts) - 1) // 2
    begin, end = starts[middle], starts[min(middle + 4, len(starts) - 1)]
    return (begin, end) if len(starts) > 12 and 0 < end - begin <= mask.n / 4 else None


def _draw_inset(
    axes: Axes, shapes: list[list[tuple[int, int]]], colors: list[Color], region: tuple[int, int]
) -> None:
    """Some documents again, larger, where the score matrix is empty because documents do not see
    one another.
    """
    begin, end = region
    near = [
        (shape, fill)
        for shape, fill in zip(shapes, colors, strict=True)
        if all(
            min(corner[axis] for corner in shape) < end
            and max(corner[axis] for corner in shape) > begin
            for axis in (0, 1)
        )
    ]
    inset = axes.inset_axes((0.53, 0.53, 0.45, 0.45))
    inset.add_collection(
        PolyCollection(
            [shape for shape, _ in near],
            facecolors=[fill for _, fill in near],
            edgecolors="white",
            linewidths=0.6,
        )
    )
    inset.set(xlim=region, ylim=(end, begin), aspect="equal")
    inset.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    label = f"tokens {begin:,} to {end:,}"
    inset.text(
        0.97, 0.97, label, transform=inset.transAxes, ha="right", va="top", fontsize=9, color=INK
    )
    axes.indicate_inset_zoom(inset, edgecolor=FAINT)


def _center(shape: np.ndarray) -> tuple[float, float]:
    """Center of gravity of a polygon [points, 2]."""
    x, y = shape.T
    cross = x * np.roll(y, -1) - np.roll(x, -1) * y
    area = cross.sum() / 2
    if abs(area) < 1e-9:
        return float(x.mean()), float(y.mean())
    return float(((x + np.roll(x, -1)) * cross).sum() / (6 * area)), float(
        ((y + np.roll(y, -1)) * cross).sum() / (6 * area)
    )


def _outline(tile: Tile) -> list[tuple[int, int]]:
    """Corners (key, query) of the area that a tile allows."""
    q0, q1, k0, k1, lo, hi = tile
    corners = sorted({q0, q1, *(query for query in (k0 - lo, k1 - hi) if q0 < query < q1)})
    left = [(max(k0, query + lo), query) for query in corners]
    right = [(min(k1, query + hi), query) for query in corners]
    return left + right[::-1]


def _draw_timeline(
    axes: Axes, plan: PlanTables, compute: list[Span], transfers: list[Span]
) -> None:
    """One lane per rank: above, the computation of its hops, and its idle time; below, the keys and
    values that it receives.
    """
    idle, busy = idle_times(compute, plan.cp)
    lanes = [(rank - 0.38, low * 1e3, high * 1e3) for rank, low, high in idle]
    shapes = [
        [(low, top), (high, top), (high, top + 0.5), (low, top + 0.5)] for top, low, high in lanes
    ]
    axes.add_collection(PolyCollection(shapes, facecolors=_IDLE, linewidths=0))
    for bars, offset, height in ((compute, -0.38, 0.5), (transfers, 0.16, 0.2)):
        shapes, colors = [], []
        for span in bars:
            # A transfer has the color of the computation that waits for it.
            low, high, top = span.start * 1e3, span.end * 1e3, span.rank + offset
            shapes.append([(low, top), (high, top), (high, top + height), (low, top + height)])
            colors.append(color(span.rank, span.hop, plan.cp, plan.schedule[-1] + 1))
        few = plan.cp <= MAX_LEGEND
        hatch = "////" if height < 0.4 and few else None
        axes.add_collection(
            PolyCollection(
                shapes, facecolors=colors, edgecolors="white", linewidths=0.5 * few, hatch=hatch
            )
        )
    _label_hops(axes, compute, plan.cp, plan.schedule[-1] + 1)
    end = max((span.end for span in compute + transfers), default=0.0) * 1e3
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(plan.cp - 0.4, -0.6))
    axes.set_yticks(range(plan.cp) if plan.cp <= 32 else range(0, plan.cp, plan.cp // 16))
    axes.set_ylabel("rank")
    keys = "arriving keys (hatched)" if plan.cp <= MAX_LEGEND else "arriving keys (thin)"
    axes.set_title(
        f"when: computation, {keys}, idle time (gray); ranks compute {busy:.0%} of the time",
        fontsize=11,
        color=INK,
    )
    _set_frame(axes)


def idle_times(compute: list[Span], cp: int) -> tuple[list[tuple[int, float, float]], float]:
    """When each rank does not compute, as (rank, begin, end) until the last rank is done; and the
    share of time that ranks do.
    """
    finish = max((span.end for span in compute), default=0.0)
    idle, free = [], dict.fromkeys(range(cp), 0.0)
    for span in sorted(compute, key=lambda span: span.start):
        if span.start > free[span.rank]:
            idle.append((span.rank, free[span.rank], span.start))
        free[span.rank] = span.end
    idle += [(rank, end, finish) for rank, end in free.items() if end < finish]
    return idle, 1 - sum(end - begin for _, begin, end in idle) / (cp * finish or 1)


def _label_hops(axes: Axes, compute: list[Span], cp: int, hops: int) -> None:
    total = max((span.end for span in compute), default=0.0)
    for span in compute:
        if cp <= 16 and span.end - span.start > total / 40:
            ink = _ink(color(span.rank, span.hop, cp, hops))
            x = (span.start + span.end) / 2 * 1e3
            axes.text(
                x, span.rank - 0.13, str(span.hop), ha="center", va="center", fontsize=8, color=ink
            )


def _set_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def _tokens(value: float, _: int | None = None) -> str:
    return f"{value / 1024:g}K" if value >= 1024 and value % 256 == 0 else f"{value:,.0f}"
