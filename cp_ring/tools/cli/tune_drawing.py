"""The predicted time of a step against the context parallel size, as a picture: where is the sweet
spot?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_ring.errors import PlanError
from cp_ring.plan.costs.training_step import EXPOSED
from cp_ring.tools.cli.drawing import FAINT, INK, check_ending

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cp_ring.plan.costs.search import Tuned
    from cp_ring.tools.job.tune import TuneResult

_PARTS = {
    "attention": ("attention",),
    "other layers": ("other layers", "output layer", "optimizer"),
    "recomputation": ("recomputation",),
    "waits for messages": EXPOSED,
    "pipeline waits": ("pipeline waits",),
    "uneven documents": ("uneven documents",),
}
_COLORS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#009e73")


def draw_times(result: TuneResult, path: str, title: str) -> None:
    """Writes the picture to `path`: a bar for the best way of each context parallel size, by what
    takes its time.

    Raises `PlanError` where the ending is not .png, .svg or .pdf, or the file cannot be written.
    """
    check_ending(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 5), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        _draw(figure.subplots(), result)
        figure.suptitle(f"{title}: predicted time of a step, not measured", color=INK)
        try:
            figure.savefig(path, dpi=140)
        except OSError as error:
            raise PlanError(f"--draw {path}: cannot write: {error.strerror}") from None


def _draw(axes: Axes, result: TuneResult) -> None:
    cps = sorted(result.by_cp)
    ways: list[tuple[int, Tuned]] = []
    top = max(way.step for way in result.by_cp.values() if not isinstance(way, float))
    for place, cp in enumerate(cps):
        way = result.by_cp[cp]
        if isinstance(way, float):
            axes.text(
                place, top / 2, f"does not fit:\n{way / 1e9:.0f} GB", ha="center", color=FAINT
            )
        else:
            ways.append((place, way))
    below = [0.0] * len(ways)
    for (name, items), color in zip(_PARTS.items(), _COLORS, strict=True):
        heights = [sum(way.seconds.get(item, 0.0) for item in items) for _, way in ways]
        if any(heights):
            axes.bar(
                [place for place, _ in ways], heights, 0.7, bottom=below, color=color, label=name
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
    best = result.best[0][0]
    for place, way in ways:
        sizes = way.sizes
        mark = " *" if sizes.cp == best.sizes.cp else ""
        label = f"{way.step:.3g} s{mark}\ntp {sizes.tp} pp {sizes.pp} dp {sizes.dp}"
        axes.text(place, way.step, label, ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_xticks(range(len(cps)), [str(cp) for cp in cps])
    axes.set_xlabel("context parallel size, each with its best other sizes; * is the fastest")
    axes.set_ylabel("seconds")
    axes.set_ylim(0, 1.2 * top)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, ncols=3, fontsize=8)
