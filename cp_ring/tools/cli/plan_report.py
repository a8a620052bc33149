"""What `cp-ring plan` says of a plan: its numbers, those of other shapes, and the table that it
prints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import Cost, between_nodes, crossing
from cp_ring.plan.costs.shapes import AUTO, Assumed, costed, planned, shapes_of
from cp_ring.plan.costs.simulate import (
    accumulator_bytes,
    kernel_calls,
    rank_updates,
    sampled_ranks,
    simulate,
)
from cp_ring.plan.costs.waves import filled
from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import Capabilities
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.routes import DEFAULT
from cp_ring.plan.schedule import NAMES, group_sizes
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.plan.tables import PlanTables

MAX_RANKS_SHOWN = 32
EXPOSED_BYTES_PER_SECOND = 5e10  # a network card of 400 Gb/s
MAX_RANKS_COSTED = 64  # the speed of a rank takes about 20 ms to predict
MAX_RANKS_PREDICTED = 256  # the times of all shapes take about a second for 64 ranks
MAX_RANKS_COMPARED = 1024  # the plans of all shapes, and each rank's calls, take minutes for more


def summary(
    plan: PlanTables, report: Report, costs: Cost, ranks_per_node: int, kernel: Capabilities
) -> dict[str, Any]:
    """The numbers of a plan, ready for JSON. Bytes are keys and values of one forward pass."""
    return {
        "mask": plan.mask.name,
        "layout": plan.layout.name,
        "route": plan.route,
        "schedule": list(plan.schedule),
        "n": plan.n,
        "cp": plan.cp,
        "tokens_per_rank": report.tokens_per_rank.tolist(),
        "work_per_rank": report.work_per_rank.tolist(),
        "bytes_in_per_rank": costs.bytes_in.sum(1).tolist(),
        "bytes_out_per_rank": costs.bytes_out.sum(1).tolist(),
        "gradient_bytes_in_per_rank": costs.gradient_bytes_in.sum(1).tolist(),
        "gradient_bytes_out_per_rank": costs.gradient_bytes_out.sum(1).tolist(),
        "forward_flops_per_rank": costs.forward_flops.sum(1).tolist(),
        "backward_flops_per_rank": costs.backward_flops.sum(1).tolist(),
        "kernel_calls_per_rank": kernel_calls(plan, kernel).tolist()
        if plan.cp <= MAX_RANKS_COMPARED
        else None,
        "moving_hops_per_rank": report.moving_hops.tolist(),
        "moving_hops": int((report.keys_in.sum(0) > 0).sum()),
        "share_of_full_ring": report.share_of_full_ring,
        "share_between_nodes": between_nodes(plan, ranks_per_node),
        "balance": report.balance,
        "slots": report.slots,
        "memory": costs.memory,
    }


def speed(plan: Plan, report: Report, assumed: Assumed) -> dict[str, Any]:
    """Bytes that merges, sums, casts and zero fills of each rank read and write, and predicted
    speeds.

    Both are of forward and backward. Speeds are those of the slowest rank, relative to one kernel
    call, where all ranks share a node and where each has a node of its own. None for more than
    `MAX_RANKS_COSTED` ranks.
    """
    if plan.cp > MAX_RANKS_COSTED:
        return dict.fromkeys(("accumulator_bytes_per_rank", "predicted_efficiency", "filled"))
    sizes, rates, _, kernel = assumed
    updates = {
        rank: rank_updates(plan.rank_plan(rank * plan.ulysses), kernel)
        for rank in range(plan.ring.cp)
    }
    predicted = {}
    for name, ranks_per_node in (("nvlink", plan.cp), ("network", 1)):
        found = simulate(plan, report, sizes, rates, ranks_per_node, kernel, updates)
        predicted[name] = {"forward": found.efficiency_forward, "both": found.efficiency_both}
    moved = [
        sum(accumulator_bytes(of_rank, sizes.of_rank(plan.ulysses))) for of_rank in updates.values()
    ]
    return {
        "accumulator_bytes_per_rank": moved,
        "predicted_efficiency": predicted,
        "filled": filled(
            [updates[rank].grids for rank in sampled_ranks(plan.ring.cp)],
            sizes.batch * sizes.of_rank(plan.ulysses).heads,
            rates.processors,
            updates[0].streams(rates),
        )
        if rates.processors
        else None,
    }


def shapes_of_plan(mask: Mask, asked: PlanSpec, assumed: Assumed) -> list[dict[str, Any]]:
    """What each shape costs in one layer; times only for up to `MAX_RANKS_PREDICTED` ranks."""
    found, layout = [], cast(Layout, asked.layout)
    if layout.cp > MAX_RANKS_COMPARED:
        return []
    asked = replace(asked, route=AUTO, schedule=AUTO)
    several = 1 < layout.cp <= MAX_RANKS_PREDICTED
    free = replace(asked, route=DEFAULT, ulysses=1, slot_shards=None)
    schedules = [replace(free, schedule=name) for name in NAMES if name != AUTO] if several else []
    for shape in [*shapes_of(layout.cp, assumed.sizes, asked), *schedules]:
        facts = {"name": shape.name, "route": shape.route, "heads": shape.ulysses}
        facts["schedule"] = shape.schedule
        plan = planned(mask, layout.cp, shape, assumed.rates)
        if layout.cp > MAX_RANKS_PREDICTED:
            moved = crossing(plan, assumed.sizes, assumed.ranks_per_node)
            facts["bytes_between_nodes"] = moved.keys + moved.exchange
        else:
            made = costed(plan, plan.verify(layout.cp), assumed)
            facts |= made._asdict() | {"hops": list(plan.schedule)} | made.timeline.facts()
            del facts["timeline"]
        found.append(facts)
    return found


def times(plan: Plan, report: Report, assumed: Assumed) -> dict[str, Any] | None:
    """The predicted times of a plan; None for more than `MAX_RANKS_PREDICTED` ranks.

    `without_waves` has those that take a fixed time for each kernel call, or None.
    """
    if plan.cp > MAX_RANKS_PREDICTED:
        return None
    fixed = replace(assumed.rates, processors=0)
    both = (simulate(plan, report, *assumed._replace(rates=x)) for x in (assumed.rates, fixed))
    found, without = (timeline.facts() for timeline in both)
    return found | {"without_waves": without if assumed.rates.processors else None}


def exposed(plan: Plan, report: Report, assumed: Assumed) -> dict[str, dict[str, float]] | None:
    """Predicted seconds that the slowest rank waits at 50 GB/s: of the codec, and of keys that
    travel as they are.
    """
    if plan.cp > MAX_RANKS_PREDICTED:
        return None
    rates = Rates(inside=EXPOSED_BYTES_PER_SECOND, between=EXPOSED_BYTES_PER_SECOND)
    found = {}
    for wire in dict.fromkeys(("plain", assumed.sizes.wire)):
        sizes = replace(assumed.sizes, wire=wire)
        made = simulate(plan, report, sizes, rates, assumed.ranks_per_node, assumed.kernel)
        found[wire] = {"forward": made.exposed_forward, "both": made.exposed_both}
    return found


def print_plan(plan: PlanTables, facts: dict[str, Any]) -> None:
    """Prints the numbers of a plan as tables and sentences."""
    console = Console()
    _print_verdict(console, plan, facts)
    title = (
        f"{plan.mask.describe()}; {plan.n:,} tokens on {plan.cp} ranks, {plan.layout.name} layout, "
        f"{plan.route} route"
    )
    table = Table(title=title)
    for name in ("rank", "tokens", "work (pairs)", "of mean", "MiB in", "MiB out", "moving hops"):
        table.add_column(name, justify="right")
    mean = sum(facts["work_per_rank"]) / plan.cp or 1
    for rank in range(plan.cp)[:MAX_RANKS_SHOWN]:
        work, bytes_in, bytes_out = (
            facts[f"{name}_per_rank"][rank] for name in ("work", "bytes_in", "bytes_out")
        )
        moved = [f"{amount / 2**20:,.1f}" for amount in (bytes_in, bytes_out)]
        tokens, hops = facts["tokens_per_rank"][rank], facts["moving_hops_per_rank"][rank]
        table.add_row(
            str(rank), f"{tokens:,}", f"{work:,}", f"{work / mean:.3f}", *moved, str(hops)
        )
    console.print(table)
    if plan.cp > MAX_RANKS_SHOWN:
        console.print(f"... and {plan.cp - MAX_RANKS_SHOWN} more ranks (--json has all)")
    console.print(
        f"balance {facts['balance']:.3f} (max / mean work); {facts['share_of_full_ring']:.1%} of a "
        f"full ring on the wire, {facts['share_between_nodes']:.1%} of that between nodes; proven: "
        f"built in {facts['build_ms']:.1f} ms, verified in {facts['verify_ms']:.1f} ms, "
        f"{facts['slots']} receive buffers in use"
    )
    groups = group_sizes(plan.schedule)
    sources = ", ".join(map(str, groups)) or "none"
    if len(groups) > MAX_RANKS_SHOWN:
        sources = f"at most {max(groups)} in {len(groups)} hops"
    calls = "too many ranks to count kernel calls and to compare other shapes"
    if facts["kernel_calls_per_rank"]:
        calls = (
            f"at most {max(facts['kernel_calls_per_rank'])} kernel calls of a rank in forward, "
            f"with the kernel {facts['kernel']}, which is assumed (--kernel)"
        )
    console.print(f"remote sources of each hop: {sources}; {calls}")
    if facts["filled"]:
        shares = {name: f"{share:.3f}" for name, share in facts["filled"].items()}
        without = facts["predicted"]["without_waves"]
        console.print(
            f"its calls fill the processors to {shares['forward']} in forward and "
            f"{shares['backward']} in backward, one call of as many pairs to {shares['one']}; with "
            f"a fixed time for each call in place of that, speeds are "
            f"{without['efficiency_forward']:.3f} and {without['efficiency_both']:.3f} of one call"
        )
    if facts["chosen"]:
        console.print(f"chosen: {facts['chosen']}")
    if facts["shapes"]:
        _print_shapes(console, facts)
    if facts["predicted_exposed_seconds"]:
        waits = facts["predicted_exposed_seconds"].items()
        shown = [f"{wire} {1e3 * x['forward']:,.2f}, {1e3 * x['both']:,.2f}" for wire, x in waits]
        console.print(
            "predicted wait if every link had 50 GB/s, ms, forward and with backward: "
            f"{'; '.join(shown)}"
        )
    buffers = Table("buffer, on the rank that needs most of it", "MiB")
    for name, size in facts["memory"].items():
        buffers.add_row(name, f"{size / 2**20:,.1f}")
    console.print(buffers)


def sparse_bytes(
    report: Report, layout: Layout, sizes: AttentionSizes, text: str
) -> dict[str, float]:
    """Bytes that sparse attention moves in forward of a layer, of all ranks: the indexer's keys,
    latents, and latents of the tokens alone that the queries of a rank are expected to select,
    with a request for each; `share` is that of these tokens.

    text: the keys that a query selects, and the size of the indexer's key.
    """
    numbers = [int(x) if x.isdecimal() else 0 for x in text.split(",")]
    if len(numbers) != 2 or min(numbers) < 1 or sizes.latent is None:
        raise PlanError(f"--sparse {text}: it must be TOPK,SIZE, as 2048,128, beside --mla")
    indexer, latent = sizes.sparse_on_wire(numbers[1])
    arriving, queries = report.keys_in.sum(1), layout.tokens_per_rank
    missed = (1 - min(1.0, numbers[0] / layout.n)) ** queries
    selected = float((arriving * (1 - missed)).sum())
    total = int(arriving.sum())
    return {
        "indexer": total * indexer, "latents": total * latent,
        "selected": selected * (latent + 4), "share": selected / max(total, 1),
    }  # fmt: skip


def print_sparse(found: dict[str, float]) -> None:
    """Prints which is less: all latents that queries see, or those selected."""
    indexer, latents, selected = (
        f"{found[name] / 2**20:,.1f} MiB" for name in ("indexer", "latents", "selected")
    )
    less = "more: all travel" if found["selected"] >= found["latents"] else "less, not built"
    Console().print(
        f"sparse attention, forward of all ranks: keys of the indexer {indexer}, latents {latents};"
        f" those selected alone ({found['share']:.1%}, expected) with requests {selected}, {less}",
        soft_wrap=True,
    )


def _print_verdict(console: Console, plan: PlanTables, facts: dict[str, Any]) -> None:
    """The first line: whether the plan is right, how long a layer takes, and how much of that is
    waiting.
    """
    own = facts["predicted"]
    times = "too many ranks to predict the time"
    if own is not None:
        times = (
            f"a layer takes {1e3 * own['forward_s']:.3g} ms forward, {1e3 * own['both_s']:.3g} ms "
            f"with backward (predicted), of which it waits {1e3 * own['exposed_both_s']:.3g} ms "
            f"({own['exposed_both_s'] / (own['both_s'] or 1):.1%}); "
            f"{own['efficiency_forward']:.3f} and {own['efficiency_both']:.3f} of the speed of one "
            "kernel call"
        )
    console.print(f"proven for {plan.cp} ranks: {times}", style="bold")


def _print_shapes(console: Console, facts: dict[str, Any]) -> None:
    timed = facts["predicted"] is not None
    columns = ("GiB a card", "ms", "with backward", "waits", "of one call") if timed else ()
    table = Table(title="one layer; bytes of forward, predicted times")
    table.add_column("shape", no_wrap=True)
    for name in ("GiB between nodes", *columns):
        table.add_column(name, justify="right")
    for shape in facts["shapes"]:
        cells = [shape["name"], f"{shape['bytes_between_nodes'] / 2**30:,.2f}"]
        if timed:
            cells += [f"{shape['bytes_per_card'] / 2**30:,.2f}"]
            cells += [
                f"{1e3 * shape[name]:,.2f}" for name in ("forward_s", "both_s", "exposed_both_s")
            ]
            cells += [f"{shape['efficiency_both']:.2f}"]
        table.add_row(*cells)
    console.print(table)
