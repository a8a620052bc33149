"""The command line of `cp-ring bench wire`; the measurement is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_ring.cli.options import AsJson
from cp_ring.cli.tables import print_measured, told


def bench_wire(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence, on two ranks.")] = 4096,
    ratio: Annotated[
        float, typer.Option(help="Time of plain's messages on the wire, divided by its time on the free wire.")
    ] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each codec runs once per round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Time forward and backward with each codec on two CPU ranks with a throttled link between them.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures nothing.
    """
    from cp_ring.bench.wire import run
    from cp_ring.errors import ConfigError

    if seq_length < 4 or seq_length % 4:
        raise ConfigError(f"--seq-length {seq_length} does not divide by 4, the chunks of two ranks")
    if not ratio > 0:
        raise ConfigError(f"--ratio {ratio:g} must be above 0")
    results = run(seq_length, ratio, repeats)
    if not told({"results": results}, as_json):
        return
    from rich.table import Table

    table = Table("case", "codec", "median s", "min - max s", "times as fast as plain",
                  title=f"causal, {seq_length} tokens, 2 ranks, float32, a wire on which plain takes {ratio:g} x")  # fmt: skip
    for result in results:
        spread = f"{result['min_s']:.3f} - {result['max_s']:.3f}"
        table.add_row(result["case"], result["wire"], f"{result['median_s']:.3f}", spread, f"{result['faster']:.2f}")
    print_measured(table)
