"""The command line of `cp-ring bench nodes`; the measurement is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_ring.cli.options import AsJson, HeadDim, Heads
from cp_ring.cli.tables import print_measured, told


def bench_nodes(
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence, on four ranks.")] = 4096,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    share: Annotated[
        float, typer.Option(help="Speed of the link, as a share of what hiding the transfers of direct would need.")
    ] = 0.5,
    full: Annotated[bool, typer.Option("--full", help="A full mask instead of a causal one.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each shape runs once per round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Time forward and backward on two nodes of two CPU ranks each with a slow link between the nodes: direct, relay and heads.

    Needs root, for network namespaces, which are the nodes. Where it cannot make them, it prints why and measures nothing.
    """
    from cp_ring.bench.contest import Contest
    from cp_ring.bench.nodes import run
    from cp_ring.errors import ConfigError

    if seq_length % 8:
        raise ConfigError(f"--seq-length {seq_length} does not divide by 8, the chunks of four ranks")
    if heads % 2:
        raise ConfigError(f"--heads {heads}: two ranks exchange heads, so it must divide by 2")
    if not share > 0:
        raise ConfigError(f"--share {share:g} must be above 0")
    results = run(Contest(seq_length, 4, heads, head_dim), repeats, share, full)
    if not told({"rows": results}, as_json):
        return
    from rich.table import Table

    table = Table("shape", "MiB between nodes", "free wire, median s", "slow wire, median s", "min - max s", "over direct",
                  title=f"{'full' if full else 'causal'}, {seq_length} x {heads} x {head_dim}, 2 nodes of 2 ranks, "
                        f"{results[0]['bytes_per_s'] / 1e6:.3g} MB/s between them")  # fmt: skip
    for result in results:
        spread = f"{result['min_s']:.3f} - {result['max_s']:.3f}"
        moved = f"{result['bytes_between_nodes'] / 2**20:.1f}"
        times = f"{result['free_s']:.3f}", f"{result['median_s']:.3f}"
        table.add_row(result["shape"], moved, *times, spread, f"{result['over_direct']:.2f}")
    print_measured(table)
