"""`cp-ring trace`: what a trace shows, as tables and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_ring.tools.cli.option_models import WRITTEN, AsJson


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
    from cp_ring.observe import trace

    found = trace.read(file)
    facts = summary(found)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _show(facts)
    if draw:
        from cp_ring.tools.cli.trace_drawing import draw as draw_call

        draw_call(found, draw, call)
        typer.echo(f"wrote {draw}", err=as_json)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Computation and waiting by hop and by rank, mean milliseconds of a rank; the slowest
    messages.
    """
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    ranks = sorted({event["pid"] for event in slices})
    hops: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(
        lambda: {"compute_ms": 0.0, "wait_ms": 0.0}
    )
    each = {rank: {"rank": rank, "compute_ms": 0.0, "wait_ms": 0.0, "calls": 0} for rank in ranks}
    for event in slices:
        kind = {"hop": "compute_ms", "wait": "wait_ms"}.get(event["cat"])
        if kind:
            hops[event["args"]["direction"], event["args"]["hop"]][kind] += (
                event["dur"] / 1e3 / len(ranks)
            )
            each[event["pid"]][kind] += event["dur"] / 1e3
        each[event["pid"]]["calls"] += event["cat"] == "call"
    received = [event for event in slices if event["cat"] == "received message"]
    worst = sorted(received, key=lambda event: -event["args"]["waited_us"])[:5]
    return {
        **found["otherData"],
        "messages": len(received),
        "hops": [
            {"direction": d, "hop": hop, **_rounded(its)} for (d, hop), its in sorted(hops.items())
        ],
        "ranks": [_rounded(its) for its in each.values()],
        "longest_waits": [
            {
                "name": e["name"],
                "direction": e["args"]["direction"],
                "from": e["args"]["peer"],
                "to": e["pid"],
                "bytes": e["args"]["bytes"],
                "wait_ms": round(e["args"]["waited_us"] / 1e3, 3),
            }
            for e in worst
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

    console = Console()
    steps = ", ".join(map(str, facts["steps"]))
    compute, wait = (
        sum(its[name] for its in facts["ranks"]) / len(facts["ranks"])
        for name in ("compute_ms", "wait_ms")
    )
    console.print(
        f"step {steps}: {len(facts['ranks'])} ranks, {facts['messages']} messages; a rank computes "
        f"{compute:.1f} ms and waits {wait:.1f} ms ({wait / (compute + wait or 1):.1%}); clocks "
        f"agree to {facts['clock_error_us']:g} us",
        soft_wrap=True,
    )
    for title, entries in (
        ("hops, mean of the ranks", facts["hops"]),
        ("ranks", facts["ranks"]),
        ("longest waits", facts["longest_waits"]),
    ):
        if entries:
            table = Table(*entries[0], title=title)
            for entry in entries:
                table.add_row(*map(str, entry.values()))
            console.print(table)
