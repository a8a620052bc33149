"""The command line of `cp-ring bench timing-cost`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, parse_tokens


def bench_timing_cost(
    tokens: Annotated[int, typer.Option(parser=parse_tokens, metavar="TOKENS", help="Tokens of a rank.")] = 512,
    repeats: Annotated[int, typer.Option(help="Pairs of calls.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Measure what --cp-ring-timing costs: in steps that are recorded, and in steps that are not."""
    from cp_ring.bench import timing_cost
    from cp_ring.bench.machine import facts
    from cp_ring.errors import ConfigError

    if tokens < 8 or tokens % 2 or repeats < 1:
        raise ConfigError(f"--tokens {tokens} --repeats {repeats}: at least 8 tokens, an even number, and 1 pair are needed")
    results = timing_cost.run(tokens, repeats)
    if as_json:
        typer.echo(json.dumps({**facts(), "tokens": tokens, "results": results}))
        return
    for each in results:
        typer.echo(f"{each['what']}: {each['cost']:.3%} of a call of {each['call_ms']:.1f} ms")
