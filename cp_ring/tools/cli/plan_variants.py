"""What `cp-ring plan` shows in place of a plan: splits side by side (--compare), and the way from
one layout to another (--convert).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import typer
from rich.console import Console

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs.shapes import Assumed
from cp_ring.plan.costs.splits import Groups, Layer, SplitCost, compare, padded
from cp_ring.plan.exchange.conversion import Conversion
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints
from cp_ring.tools.cli.plan_report import MAX_RANKS_SHOWN
from cp_ring.tools.cli.terminal import emit, mib, show_table
from cp_ring.tools.lengths import PRESETS

SLOW_SCHEDULE = 20_000  # documents, for which Megatron's scheduler takes minutes


def compare_command(text: str, lengths: Ints, cp: int, assumed: Assumed, as_json: bool) -> None:
    """Prints what the splits of documents of these lengths over `cp` ranks cost; `text` says where
    the lengths come from.
    """
    layer = Layer(assumed.sizes, ranks_per_node=assumed.ranks_per_node, rates=assumed.rates)
    groups, missing = _hybrid_schedule(lengths, cp)
    splits = compare(lengths, cp, layer, groups)
    best = min(split.total for split in splits)
    facts = {
        "lengths": text,
        "cp": cp,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "layer": asdict(layer),
        "hybrid_missing": missing,
        "splits": [asdict(split) | {"ratio": split.total / best} for split in splits],
    }
    emit(facts, as_json, lambda: _show_splits(facts, splits, layer))


def _show_splits(facts: dict[str, Any], splits: list[SplitCost], layer: Layer) -> None:
    best = min(split.total for split in splits)
    text, n = facts["lengths"], facts["tokens"]
    show_table(
        f"{text}: {facts['documents']:,} documents, {n:,} tokens, the longest "
        f"{facts['longest']:,}; {facts['cp']} ranks",
        "split",
        [
            "padding",
            "balance",
            "MiB in",
            "GiB to nodes",
            "forward ms",
            "back ms",
            "ratio",
        ],
        (
            [
                split.name,
                f"{split.padding / n:.1%}",
                f"{split.balance:.2f}",
                f"{split.bytes_in / 2**20:,.0f}",
                f"{split.between_nodes / 2**30:,.2f}",
                f"{split.forward * 1e3:,.1f}",
                f"{split.backward * 1e3:,.1f}",
                f"{split.total / best:.2f}",
            ]
            for split in splits
        ),
    )
    console, rates = Console(), layer.rates
    if facts["hybrid_missing"]:
        console.print(facts["hybrid_missing"])
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


def names_of(text: str) -> tuple[str, str]:
    """The names of the two layouts; raises `PlanError` for another number of them."""
    before, colon, after = text.partition(":")
    if not (before and colon and after) or ":" in after:
        raise PlanError(
            f"--convert {text!r}: give two layouts, BEFORE:AFTER, as in zigzag:contiguous"
        )
    return before, after


def convert_command(
    before: Layout,
    after: Layout,
    token_bytes: int,
    ranks_per_node: int,
    as_json: bool,
    draw: str | None = None,
) -> None:
    """Makes and proves the conversion, and prints what each rank sends and receives; `token_bytes`
    are those of a token.
    """
    begun = time.perf_counter()
    plan = Conversion.build(before, after)
    built = time.perf_counter()
    plan.verify()
    facts = summary(plan, token_bytes, ranks_per_node)
    facts |= {"build_ms": 1e3 * (built - begun), "verify_ms": 1e3 * (time.perf_counter() - built)}
    emit(facts, as_json, lambda: _print(facts))
    if draw:
        _draw(plan, draw)
        typer.echo(f"wrote {draw}", err=as_json)


def summary(plan: Conversion, token_bytes: int, ranks_per_node: int) -> dict[str, Any]:
    """The numbers of a conversion, ready for JSON; its way back moves the same bytes in the other
    direction.
    """
    moved, cp = plan.traveling, plan.before.cp
    node = np.arange(cp) // ranks_per_node
    tokens = [
        np.bincount(layout.owner, np.diff(layout.edges), cp).astype(np.int64)
        for layout in (plan.before, plan.after)
    ]
    return {
        "before": plan.before.name,
        "after": plan.after.name,
        "n": plan.before.n,
        "cp": cp,
        "bytes_per_token": token_bytes,
        "tokens_before_per_rank": tokens[0].tolist(),
        "tokens_after_per_rank": tokens[1].tolist(),
        "bytes_in_per_rank": (moved.sum(0) * token_bytes).tolist(),
        "bytes_out_per_rank": (moved.sum(1) * token_bytes).tolist(),
        "messages_out_per_rank": (moved > 0).sum(1).tolist(),
        "share_of_tokens_that_travel": float(moved.sum() / plan.before.n),
        "bytes_between_nodes": int(moved[node[:, None] != node].sum() * token_bytes),
    }


def _print(facts: dict[str, Any]) -> None:
    console, cp = Console(), facts["cp"]
    names = "tokens_before", "tokens_after", "bytes_out", "bytes_in", "messages_out"
    ranks = [*enumerate(zip(*(facts[f"{name}_per_rank"] for name in names), strict=True))]
    show_table(
        f"{facts['before']} to {facts['after']}: {facts['n']:,} tokens of "
        f"{facts['bytes_per_token']:,} bytes, {cp} ranks",
        "",
        [
            "rank",
            "tokens before",
            "tokens after",
            "MiB out",
            "MiB in",
            "messages out",
        ],
        (
            [str(rank), f"{before:,}", f"{after:,}", mib(out), mib(into), str(messages)]
            for rank, (before, after, out, into, messages) in ranks[:MAX_RANKS_SHOWN]
        ),
    )
    if cp > MAX_RANKS_SHOWN:
        console.print(f"... and {cp - MAX_RANKS_SHOWN} more ranks (--json has all)")
    console.print(
        f"{facts['share_of_tokens_that_travel']:.1%} of the tokens travel, "
        f"{mib(facts['bytes_between_nodes'])} MiB between nodes; gradients go the way back; "
        f"proven: built in {facts['build_ms']:.1f} ms, verified in {facts['verify_ms']:.1f} ms"
    )


def _draw(plan: Conversion, path: str) -> None:
    """Both layouts as strips of the sequence, colored by the rank that holds a chunk."""
    from cp_ring.tools.cli.drawing import color, picture

    cp, n = plan.before.cp, plan.before.n
    with picture(path, 12, 2.4) as figure:
        axes = figure.subplots()
        for height, layout in ((1, plan.before), (0, plan.after)):
            chunks = zip(layout.edges[:-1].tolist(), np.diff(layout.edges).tolist(), strict=True)
            colors = [color(int(rank), 0, cp, 1) for rank in layout.owner]
            axes.broken_barh(list(chunks), (height, 0.8), facecolors=colors)
        axes.set_yticks([1.4, 0.4], [plan.before.name, plan.after.name])
        traveling = f"{plan.traveling.sum() / n:.1%} of them travel"
        axes.set(xlim=(0, n), xlabel=f"tokens, colored by rank; {traveling}")
