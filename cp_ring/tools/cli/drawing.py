"""A plan as a picture: the score matrix colored by rank and hop, and the predicted timeline of its
hops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs.simulate import Span, spans
from cp_ring.plan.mask import Mask
from cp_ring.plan.proof.cover import tiles_in_stream
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.tiles import Tile

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import ListedColormap, Normalize, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MultipleLocator
except ModuleNotFoundError:
    raise ConfigError("drawing a plan needs matplotlib: pip install matplotlib") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cp_ring.plan.plan import Plan
    from cp_ring.plan.tables import PlanTables

Color = tuple[float, float, float]

MAX_LEGEND = 16
INK, FAINT, _IDLE = "#22272e", "#6b7280", "#e5e7eb"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
_RANKS, _HOPS = "viridis", "magma"
"""Scales of many ranks, and of their hops; of each as much as can be read on white."""
_READABLE = 0.9


class Look(NamedTuple):
    """What a picture of a plan shows: `left` (the score matrix), `right` (the timeline) or `both`,
    `width` inches wide.

    sizes, rates, ranks_per_node: those of the predicted timeline.
    """

    sizes: AttentionSizes = AttentionSizes()
    rates: Rates = RATES
    ranks_per_node: int = 1
    panel: str = "both"
    width: float = 15.0


@contextmanager
def picture(path: str, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, which is written to `path` at the end of the block.

    It becomes PNG, SVG or PDF by the ending of `path`. Text stays text in SVG and PDF. Raises
    `PlanError` where the ending is another one, or the file cannot be written.
    """
    check_ending(path)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(path, dpi=140)
        except OSError as error:
            raise PlanError(f"--draw {path}: cannot write: {error.strerror}") from None


def draw(plan: Plan, path: str, look: Look | None = None, report: Report | None = None) -> None:
    """Writes the picture of a plan to `path`, as `picture` does. `report` is by default the result
    of `plan.verify`.

    Raises `PlanError` also where an option has no such value.
    """
    look = look or Look()
    check_panel(look.panel, look.width)
    report = report or plan.verify(num_slots=plan.cp)
    ring, wide = plan.ring, look.panel == "both"
    with picture(path, look.width, look.width * (0.52 if wide else 0.85)) as figure:
        panels = figure.subplots(1, 2, width_ratios=(1, 1.15)) if wide else [figure.subplots()] * 2
        if look.panel != "right":
            _draw_scores(panels[0], ring)
        if look.panel != "left":
            bars = spans(ring, report, look.sizes, look.rates, look.ranks_per_node)
            _draw_timeline(panels[1], ring, *bars)
            panels[1].set_xlabel(f"time of one layer's forward pass (ms)\n{_caption(look)}")
        figure.suptitle(_title(ring, report, look.sizes, wide), fontsize=13, color=INK)
        if ring.cp <= MAX_LEGEND:
            figure.legend(
                handles=[
                    Patch(color=color(rank, 0, ring.cp, 1), label=f"rank {rank}")
                    for rank in range(ring.cp)
                ],
                loc="outside lower center",
                ncols=min(ring.cp, 8),
                frameon=False,
                fontsize=10,
            )
            return
        for panel, axes, label, last, scale in (
            ("left", panels[0], "rank", ring.cp - 1, _RANKS),
            ("right", panels[-1], "hop", ring.schedule[-1], _HOPS),
        ):
            if look.panel in (panel, "both"):
                shades = ListedColormap([_scaled(scale, step / 255) for step in range(256)])
                mappable = ScalarMappable(Normalize(0, last), shades)
                figure.colorbar(mappable, ax=axes, label=label, shrink=0.6, pad=0.01)


def check_panel(panel: str, width: float) -> None:
    """Raises `PlanError` for another panel than left, right, both and states, or a width that is
    no picture's.
    """
    if panel not in ("left", "right", "both", "states"):
        raise PlanError(f"--panel {panel!r}: it must be left, right, both or states")
    if not 2 <= width <= 60:
        raise PlanError(f"--width {width:g}: it must be a number of inches from 2 to 60")


def _title(plan: PlanTables, report: Report, sizes: AttentionSizes, wide: bool) -> str:
    heads = (
        f"{sizes.heads} heads, {sizes.kv_heads} for keys and values, of {sizes.head_dim}, "
        f"{sizes.dtype}"
    )
    codec = "" if sizes.codec.plain else f", which travels as {sizes.wire}"
    facts = (
        f"{plan.mask.describe()}; {heads}",
        f"{plan.n:,} tokens on {plan.cp} ranks; {plan.layout.name} layout, {plan.route} route, "
        f"{plan.schedule[-1]} remote hops",
        f"balance {report.balance:.3f} (max / mean work), {report.share_of_full_ring:.1%} of a "
        f"full ring on the wire{codec}",
    )
    return f"{facts[0]}; {facts[1]}\n{facts[2]}" if wide else "\n".join(facts)


def _caption(look: Look) -> str:
    rates, ranks = look.rates, look.ranks_per_node
    inside = f"{rates.inside / 1e9:g} GB/s inside a node of {ranks}, " if ranks > 1 else ""
    return (
        f"predicted, not measured, at {rates.flops / 1e12:g} TFLOP/s a rank, {inside}"
        f"{rates.between / 1e9:g} GB/s between nodes"
    )


def check_ending(path: str) -> None:
    """Raises `PlanError` unless `path` ends in .png, .svg or .pdf."""
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise PlanError(f"--draw {path}: the file must end in .png, .svg or .pdf")


def color(rank: int, hop: int, cp: int, hops: int) -> Color:
    """The color of a rank at a hop, paler at later hops of up to `MAX_LEGEND` ranks.

    Up to 8 ranks have colors that readers with a color vision deficiency tell apart (after Okabe
    and Ito, https://jfly.uni-koeln.de/color, and Tol, https://sronpersonalpages.nl/~pault); more
    ranks have a color of a scale that is also one of brightness.
    """
    few = cp <= len(COLORS)
    base = to_rgb(COLORS[rank]) if few else _scaled(_RANKS, rank / (cp - 1))
    fade = 0.65 * hop / max(hops - 1, 1) * (cp <= MAX_LEGEND)
    red, green, blue = (part + (1 - part) * fade for part in base)
    return red, green, blue


def _scaled(scale: str, share: float) -> Color:
    red, green, blue, _ = matplotlib.colormaps[scale](share * _READABLE)
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
    areas = tiles.area().tolist()
    for shape, number, area, fill in zip(shapes, hop.tolist(), areas, colors, strict=True):
        if 1 < plan.cp <= MAX_LEGEND and area**0.5 > plan.n / 40:
            x, y = np.unique(shape, axis=0).mean(0)
            axes.text(x, y, str(number), ha="center", va="center", fontsize=8, color=_ink(fill))
    axes.set(
        xlim=(0, plan.n),
        ylim=(plan.n, 0),
        aspect="equal",
        xlabel="key position",
        ylabel="query position",
    )
    numbers = ", and at which hop (number)" * (plan.cp <= MAX_LEGEND)
    axes.set_title(f"which rank computes which pairs{numbers}", fontsize=11, color=INK)
    set_frame(axes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(plan.n // 8, 1)))
        axis.set_major_formatter(FuncFormatter(tokens_of))


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
    axes: Axes,
    shapes: list[list[tuple[int, int]]],
    colors: list[Color],
    region: tuple[int, int],
) -> None:
    """Some documents again, larger, where the score matrix is empty because documents do not see
    one another.
    """
    begin, end = region

    def is_near(shape: list[tuple[int, int]]) -> bool:
        return all(min(side) < end and max(side) > begin for side in zip(*shape, strict=True))

    near = [pair for pair in zip(shapes, colors, strict=True) if is_near(pair[0])]
    inset = axes.inset_axes((0.53, 0.53, 0.45, 0.45))
    near_shapes, near_colors = zip(*near, strict=True)
    inset.add_collection(
        PolyCollection(near_shapes, facecolors=near_colors, edgecolors="white", linewidths=0.6)
    )
    inset.set(xlim=region, ylim=(end, begin), aspect="equal")
    inset.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    label = f"tokens {begin:,} to {end:,}"
    inset.text(
        0.97, 0.97, label, transform=inset.transAxes, ha="right", va="top", fontsize=9, color=INK
    )
    axes.indicate_inset_zoom(inset, edgecolor=FAINT)


def _outline(tile: Tile) -> list[tuple[int, int]]:
    """Corners (key, query) of the area that a tile allows."""
    q0, q1, k0, k1, lo, hi = tile
    corners = sorted({q0, q1, *(query for query in (k0 - lo, k1 - hi) if q0 < query < q1)})
    left = [(max(k0, query + lo), query) for query in corners]
    right = [(min(k1, query + hi), query) for query in corners]
    return left + right[::-1]


def _draw_timeline(
    axes: Axes,
    plan: PlanTables,
    compute: list[Span],
    transfers: list[Span],
) -> None:
    """One lane per rank: above, the computation of its hops, and its idle time; below, the keys and
    values that it receives.
    """
    idle, busy = idle_times(compute, plan.cp)
    few, hops = plan.cp <= MAX_LEGEND, plan.schedule[-1] + 1
    gaps = [(low * 1e3, high * 1e3, rank - 0.38, _IDLE) for rank, low, high in idle]
    add_bars(axes, gaps, 0.5, linewidths=0)
    for blocks, offset, height, hatch in (
        (compute, -0.38, 0.5, None),
        (transfers, 0.16, 0.2, "////" if few else None),
    ):
        bars = []
        for span in blocks:  # a transfer has the color of the computation that waits for it
            fill = color(span.rank, span.hop, plan.cp, hops)
            if not few:
                fill = _scaled(_HOPS, span.hop / max(hops - 1, 1))
            bars.append((span.start * 1e3, span.end * 1e3, span.rank + offset, fill))
        add_bars(axes, bars, height, edgecolors="white", linewidths=0.5 * few, hatch=hatch)
    _label_hops(axes, compute, plan.cp, hops)
    end = max((span.end for span in compute + transfers), default=0.0) * 1e3
    axes.set(xlim=(0, end * 1.01 or 1), ylim=(plan.cp - 0.4, -0.6))
    axes.set_yticks(range(plan.cp) if plan.cp <= 32 else range(0, plan.cp, plan.cp // 16))
    axes.set_ylabel("rank")
    keys = f"arriving keys ({'hatched' if few else 'thin'})"
    axes.set_title(
        f"when: computation, {keys}, idle time (gray); ranks compute {busy:.0%} of the time",
        fontsize=11,
        color=INK,
    )
    set_frame(axes)


def add_bars(
    axes: Axes,
    bars: Sequence[tuple[float, float, float, Color | str]],
    height: float,
    **look: Any,
) -> None:
    """Draws bars (begin, end, top, color); `look` has further arguments of the collection."""
    shapes = [
        [(begin, top), (end, top), (end, top + height), (begin, top + height)]
        for begin, end, top, _ in bars
    ]
    axes.add_collection(PolyCollection(shapes, facecolors=[bar[3] for bar in bars], **look))


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


def set_frame(axes: Axes) -> None:
    """The look of the axes of all pictures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def tokens_of(value: float, _: int | None = None) -> str:
    """The label of a tick."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size and value % (size / 4) == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}"
