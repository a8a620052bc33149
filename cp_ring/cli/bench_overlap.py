"""The command line of `cp-ring bench overlap`; the measuring itself is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def bench_overlap(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence, on two ranks.")] = 8192,
    heads: Annotated[int, typer.Option(min=1, help="Heads of queries, keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Time of a full shard on the wire over that of a hop's compute; repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each wire has one step a round.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Time forward and backward on two CPU ranks with a throttled link between them: the communication that shows.

    Needs root, for network namespaces; says so, and measures nothing, where it cannot have them. Default ratios: 0.5, 0.9.
    """
    from cp_ring.bench.attention import Contest
    from cp_ring.bench.machine import facts
    from cp_ring.bench.overlap import run
    from cp_ring.errors import ConfigError

    if seq_length < 4 or seq_length % 4:
        raise ConfigError(f"--seq-length {seq_length} does not divide by 4, the chunks of two ranks")
    bad = [x for x in ratio or [] if not x > 0]
    if bad:
        raise ConfigError(f"--ratio {bad[0]:g} must be above 0")
    rows = run(Contest(seq_length, 2, heads, head_dim), ratio or [0.5, 0.9], repeats)
    if as_json:
        typer.echo(json.dumps({**facts(), "rows": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    if "skipped" in rows[0]:
        Console().print(f"not measured: {rows[0]['skipped']}", soft_wrap=True)
        return
    table = Table("transfer / compute of a hop", "of them, ms", "step, median s", "min - max s", "exposed",
                  title=f"causal, {seq_length} x {heads} x {head_dim}, 2 ranks, throttled link")  # fmt: skip
    for row in rows:
        name = f"{row['ratio']:g}" if row["ratio"] else "free wire"
        both = f"{1e3 * row['transfer_s']:.0f} / {1e3 * row['hop_s']:.0f}"
        table.add_row(name, both, f"{row['median_s']:.3f}", f"{row['min_s']:.3f} - {row['max_s']:.3f}", f"{row['exposed']:.1%}")
    Console().print(table)
    made = facts()
    Console().print(f"{made['date']}; {made['machine']}, load {made['load']}; torch {made['versions']['torch']}", soft_wrap=True)
