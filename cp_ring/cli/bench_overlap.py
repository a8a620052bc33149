"""The command line of `cp-ring bench overlap`; the measurement is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, HeadDim, Heads
from cp_ring.cli.tables import print_measured, told


def bench_overlap(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence, on two ranks.")] = 8192,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Time of a full shard on the wire, divided by the time that a hop computes; repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each wire runs once per round.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time forward and backward on two CPU ranks with a throttled link between them: how much communication is exposed.

    Needs root, for network namespaces. Where it cannot make them, it prints why and measures nothing. Default ratios: 0.5, 0.9.
    """
    from cp_ring.bench.attention import Contest
    from cp_ring.bench.overlap import run
    from cp_ring.errors import ConfigError

    if seq_length < 4 or seq_length % 4:
        raise ConfigError(f"--seq-length {seq_length} does not divide by 4, the chunks of two ranks")
    bad = [x for x in ratio or [] if not x > 0]
    if bad:
        raise ConfigError(f"--ratio {bad[0]:g} must be above 0")
    results = run(Contest(seq_length, 2, heads, head_dim), ratio or [0.5, 0.9], repeats)
    if not told({"rows": results}, as_json):
        return
    from rich.table import Table

    table = Table("transfer / compute of a hop", "of them, ms", "step, median s", "min - max s", "exposed",
                  title=f"causal, {seq_length} x {heads} x {head_dim}, 2 ranks, throttled link")  # fmt: skip
    for result in results:
        name = f"{result['ratio']:g}" if result["ratio"] else "free wire"
        both = f"{1e3 * result['transfer_s']:.0f} / {1e3 * result['hop_s']:.0f}"
        table.add_row(
            name, both, f"{result['median_s']:.3f}", f"{result['min_s']:.3f} - {result['max_s']:.3f}", f"{result['exposed']:.1%}"
        )
    print_measured(table)
