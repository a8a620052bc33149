"""`cp-ring plan --lengths ... --compare`: ways to split documents of these lengths, side by side."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.errors import ConfigError
from cp_ring.plan.costs.splits import Groups, Layer, SplitCost, compare, padded
from cp_ring.plan.ranges import Ints
from cp_ring.tools.bench.samples import PRESETS

SLOW_SCHEDULE = 20_000  # documents, for which Megatron's scheduler takes minutes


def compare_command(text: str, lengths: Ints, cp: int, layer: Layer, as_json: bool) -> None:
    """Prints what the splits of documents of these lengths over `cp` ranks cost; `text` says where
    the lengths come from.
    """
    groups, missing = _hybrid_schedule(lengths, cp)
    splits = compare(lengths, cp, layer, groups)
    best = min(split.total for split in splits)
    if as_json:
        about = {
            "lengths": text,
            "cp": cp,
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "longest": int(lengths.max()),
        }
        found = [asdict(split) | {"ratio": split.total / best} for split in splits]
        typer.echo(
            json.dumps(about | {"layer": asdict(layer), "hybrid_missing": missing, "splits": found})
        )
        return
    console = Console()
    console.print(_table(text, lengths, cp, splits, best))
    if missing:
        console.print(missing)
    rates = layer.rates
    console.print(
        f"One layer: {layer.sizes.heads} query and {layer.sizes.kv_heads} key/value heads of "
        f"{layer.sizes.head_dim}, feed-forward {layer.ffn:,}, {layer.sizes.dtype}. Rates: "
        f"{rates.flops:.2g} FLOP/s, {layer.link:.2g} B/s between nodes of {layer.ranks_per_node} "
        f"ranks and {rates.inside:.2g} B/s inside, {rates.call * 1e6:.0f} us a hop; attention in "
        f"blocks of {layer.block}. Predicted, not measured."
    )
    kind, _, name = text.partition(":")
    if kind == "preset":
        console.print(f"Published: {PRESETS[name].published}. Assumed: {PRESETS[name].assumed}.")


def _table(text: str, lengths: Ints, cp: int, splits: list[SplitCost], best: float) -> Table:
    n = int(lengths.sum())
    title = f"{text}: {len(lengths):,} documents, {n:,} tokens, the longest {lengths.max():,}; {cp} ranks"
    table = Table(title=title)
    table.add_column("split", no_wrap=True)
    for name in ("padding", "balance", "MiB in", "GiB to nodes", "forward ms", "back ms", "ratio"):
        table.add_column(name, justify="right")
    for split in splits:
        table.add_row(
            split.name,
            f"{split.padding / n:.1%}",
            f"{split.balance:.2f}",
            f"{split.bytes_in / 2**20:,.0f}",
            f"{split.between_nodes / 2**30:,.2f}",
            f"{split.forward * 1e3:,.1f}",
            f"{split.backward * 1e3:,.1f}",
            f"{split.total / best:.2f}",
        )
    return table


def _hybrid_schedule(lengths: Ints, cp: int) -> tuple[Groups | None, str]:
    """The schedule of Megatron's hybrid context parallelism, or why there is none."""
    if len(lengths) > SLOW_SCHEDULE:
        return (
            None,
            f"hybrid is left out: its scheduler is slow for more than {SLOW_SCHEDULE:,} documents",
        )
    full = padded(lengths, cp)
    try:
        from cp_ring.megatron.hybrid_schedule import hybrid_groups  # imports Megatron

        return hybrid_groups(full, cp, -(-int(full.sum()) // cp)), ""
    except ConfigError as error:
        return None, f"hybrid is left out: {error}"
