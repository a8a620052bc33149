"""`cp-ring plan --convert BEFORE:AFTER`: what it takes to bring hidden states from one layout into
another.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from cp_ring.errors import PlanError
from cp_ring.plan.exchange.conversion import Conversion
from cp_ring.plan.layout import Layout

MAX_RANKS_SHOWN = 32


def names_of(text: str) -> tuple[str, str]:
    """The names of the two layouts; raises `PlanError` for another number of them."""
    before, colon, after = text.partition(":")
    if not (before and colon and after) or ":" in after:
        raise PlanError(
            f"--convert {text!r}: give two layouts, BEFORE:AFTER, as in zigzag:contiguous"
        )
    return before, after


def convert_command(
    before: Layout,
    after: Layout,
    token_bytes: int,
    ranks_per_node: int,
    as_json: bool,
    draw: str | None = None,
) -> None:
    """Makes and proves the conversion, and prints what each rank sends and receives; `token_bytes`
    are those of a token.
    """
    begun = time.perf_counter()
    plan = Conversion.build(before, after)
    built = time.perf_counter()
    plan.verify()
    facts = summary(plan, token_bytes, ranks_per_node)
    facts |= {"build_ms": 1e3 * (built - begun), "verify_ms": 1e3 * (time.perf_counter() - built)}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print(facts)
    if draw:
        _draw(plan, draw)
        typer.echo(f"wrote {draw}", err=as_json)


def summary(plan: Conversion, token_bytes: int, ranks_per_node: int) -> dict[str, Any]:
    """The numbers of a conversion, ready for JSON; its way back moves the same bytes in the other
    direction.
    """
    moved, cp = plan.traveling, plan.before.cp
    node = np.arange(cp) // ranks_per_node
    tokens = [
        np.bincount(layout.owner, np.diff(layout.edges), cp).astype(np.int64)
        for layout in (plan.before, plan.after)
    ]
    return {
        "before": plan.before.name,
        "after": plan.after.name,
        "n": plan.before.n,
        "cp": cp,
        "bytes_per_token": token_bytes,
        "tokens_before_per_rank": tokens[0].tolist(),
        "tokens_after_per_rank": tokens[1].tolist(),
        "bytes_in_per_rank": (moved.sum(0) * token_bytes).tolist(),
        "bytes_out_per_rank": (moved.sum(1) * token_bytes).tolist(),
        "messages_out_per_rank": (moved > 0).sum(1).tolist(),
        "share_of_tokens_that_travel": float(moved.sum() / plan.before.n),
        "bytes_between_nodes": int(moved[node[:, None] != node].sum() * token_bytes),
    }


def _print(facts: dict[str, Any]) -> None:
    console, cp = Console(), facts["cp"]
    table = Table(
        title=f"{facts['before']} to {facts['after']}: {facts['n']:,} tokens of "
        f"{facts['bytes_per_token']:,} bytes, {cp} ranks"
    )
    for name in ("rank", "tokens before", "tokens after", "MiB out", "MiB in", "messages out"):
        table.add_column(name, justify="right")
    for rank in range(cp)[:MAX_RANKS_SHOWN]:
        tokens = [f"{facts[f'tokens_{when}_per_rank'][rank]:,}" for when in ("before", "after")]
        moved = [f"{facts[f'bytes_{way}_per_rank'][rank] / 2**20:,.1f}" for way in ("out", "in")]
        table.add_row(str(rank), *tokens, *moved, str(facts["messages_out_per_rank"][rank]))
    console.print(table)
    if cp > MAX_RANKS_SHOWN:
        console.print(f"... and {cp - MAX_RANKS_SHOWN} more ranks (--json has all)")
    between = facts["bytes_between_nodes"] / 2**20
    console.print(
        f"{facts['share_of_tokens_that_travel']:.1%} of the tokens travel, {between:,.1f} MiB "
        f"between nodes; gradients go the way back; proven: built in {facts['build_ms']:.1f} ms, "
        f"verified in {facts['verify_ms']:.1f} ms"
    )


def _draw(plan: Conversion, path: str) -> None:
    """Both layouts as strips of the sequence, colored by the rank that holds a chunk."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from cp_ring.tools.cli.drawing import color

    figure = Figure(figsize=(12, 2.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes, cp = figure.subplots(), plan.before.cp
    for height, layout in ((1, plan.before), (0, plan.after)):
        spans = list(zip(layout.edges[:-1].tolist(), np.diff(layout.edges).tolist(), strict=True))
        axes.broken_barh(
            spans, (height, 0.8), facecolors=[color(int(rank), 0, cp, 1) for rank in layout.owner]
        )
    axes.set_yticks([1.4, 0.4], [plan.before.name, plan.after.name])
    axes.set_xlim(0, plan.before.n)
    axes.set_xlabel(
        f"tokens, colored by rank; {plan.traveling.sum() / plan.before.n:.1%} of them travel"
    )
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise PlanError(f"--draw {path}: cannot write: {error.strerror}") from None
