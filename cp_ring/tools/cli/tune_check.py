"""`cp-ring tune --check`: predicted and measured times side by side."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

SPEARMAN, ERROR = 0.8, 0.25
"""What the model promises on an idle machine."""


def check_command(repeats: int, as_json: bool, cpu: bool) -> None:
    """Prints the comparison. Exit code 1 where the model does not hold what it promises."""
    from cp_ring.tools.bench.machine import facts
    from cp_ring.tools.bench.tune_check import RANKS, run

    result = run(repeats, cpu=cpu)
    good = result.spearman >= SPEARMAN and result.error < ERROR
    if as_json:
        typer.echo(json.dumps({**facts(), **asdict(result), "holds": good}))
        raise typer.Exit(0 if good else 1)
    console = Console()
    clock = "CPU time of a rank" if cpu else "time"
    table = Table(
        title=f"a small model on {RANKS} ranks, {clock} in ms: a step, and attention in it"
    )
    table.add_column("shape", no_wrap=True)
    for name in ("step", "predicted", "attention", "predicted", "error"):
        table.add_column(name, justify="right")
    for one in sorted(result.times, key=lambda one: float(one["step_s"])):
        columns = ("step_s", "predicted_step_s", "attention_s", "predicted_attention_s")
        error = one["predicted_attention_s"] / one["attention_s"] - 1
        table.add_row(
            one["name"], *(f"{1e3 * one[name]:,.0f}" for name in columns), f"{error:+.0%}"
        )
    console.print(table)
    turns = (
        "; they take turns, so messages hide behind nothing" if cpu or result.cores < RANKS else ""
    )
    rates = result.rates
    console.print(
        f"{result.cores} cores for {RANKS} ranks{turns}. Measured while all ranks work: "
        f"{rates.flops / 1e9:.3g} GFLOP/s in attention, {rates.flops * rates.products / 1e9:.3g} "
        f"in matrix products, {rates.inside / 1e9:.3g} GB/s a link, {rates.memory / 1e9:.3g} GB/s "
        f"in memory, {rates.call * 1e6:,.0f} us a call."
    )
    console.print(
        f"Rank correlation of steps {result.spearman:.2f} (at least {SPEARMAN}), median error of "
        f"attention {result.error:.0%} (below {ERROR:.0%}): "
        f"{'it holds' if good else 'IT DOES NOT HOLD'}",
        soft_wrap=True,
    )
    raise typer.Exit(0 if good else 1)
