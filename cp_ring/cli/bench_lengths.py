"""The command line of `cp-ring bench lengths`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from cp_ring.cli.options import AsJson, HeadDim, Heads, parse_tokens


def bench_lengths(
    seq_length: Annotated[
        int, typer.Option(parser=parse_tokens, metavar="TOKENS", help="Tokens of all documents together.")
    ] = 8192,
    cp: Annotated[int, typer.Option("--cp", "--ranks", min=2, help="Ranks, each with one thread: at most one a core.")] = 4,
    lengths: Annotated[
        str, typer.Option(metavar="SPEC", help="As in `cp-ring plan`; default: one long document and many short ones.")
    ] = "",
    heads: Heads = 4,
    head_dim: HeadDim = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each split runs once per round.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random lengths.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time attention and a token-wise layer on documents of a long-tailed set: balanced, zigzag, padded, independent ranks."""
    from cp_ring.bench import samples
    from cp_ring.bench.lengths import LAYOUTS, PackedWork, long_tail, run
    from cp_ring.bench.machine import facts
    from cp_ring.errors import ConfigError

    if seq_length < 128 * cp:
        raise ConfigError(f"--seq-length {seq_length}: {cp} ranks need at least {128 * cp} tokens")
    drawn = samples.lengths(lengths, seq_length, seed) if lengths else long_tail(seq_length, seed)
    results = run(PackedWork(tuple(drawn.tolist()), cp, heads, head_dim), list(LAYOUTS), repeats)
    if as_json:
        typer.echo(json.dumps({**facts(), "documents": len(drawn), "longest": int(drawn.max()), "rows": results}))
        return
    _show(results, f"{len(drawn)} documents, {drawn.sum():,} tokens, the longest {drawn.max():,}; {cp} ranks")


def _show(results: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from cp_ring.bench.machine import facts

    ours = results[0]
    table = Table("split", "median s", "over balanced", "CPU s", "over balanced", "tokens", "balance", "MB moved", title=title)
    for result in results:
        table.add_row(
            result["layout"], f"{result['median_s']:.3f}", f"{result['median_s'] / ours['median_s']:.2f}",
            f"{result['cpu_s']:.3f}", f"{result['cpu_s'] / ours['cpu_s']:.2f}",
            f"{result['tokens']:,}", f"{result['balance']:.2f}", f"{result['bytes'] / 1e6:,.1f}",
        )  # fmt: skip
    Console().print(table)
    made = facts()
    Console().print(f"{made['date']}; {made['machine']}, load {made['load']}", soft_wrap=True)
