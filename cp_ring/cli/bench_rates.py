"""The command line of `cp-ring bench rates`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def bench_rates(
    megabytes: Annotated[int, typer.Option(min=1, max=1024, help="MiB of a message, and of a copy.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the best counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure what this machine's kernel, memory and links do in a second: the rates that cp-ring plan assumes."""
    from cp_ring.bench import rates
    from cp_ring.bench.machine import facts

    found = rates.run(megabytes, repeats)
    if as_json:
        typer.echo(json.dumps({**facts(), **found}))
        return
    link = "" if found["link_gb_s"] is None else f" --node-bandwidth {found['link_gb_s']:.3g}"
    typer.echo(
        f"{found['device']}, kernel {found['kernel']}: {found['tflops']:.3g} TFLOP/s, {found['call_us']:.3g} us a call, memory "
        f"{found['memory_gb_s']:.3g} GB/s"
        + (", no second GPU for a link" if not link else f", link {found['link_gb_s']:.3g} GB/s")
    )
    typer.echo(f"cp-ring plan --tflops {found['tflops']:.3g}{link} ...")
