"""What `cp-ring plan` says of a plan: its numbers, those of other shapes, and the table that it
prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import between_nodes, cost, crossing
from cp_ring.plan.costs.rank_updates import accumulator_bytes, kernel_calls, rank_updates
from cp_ring.plan.costs.shapes import AUTO, Assumed, costed, planned, shapes_of
from cp_ring.plan.costs.simulate import sampled_ranks, simulate
from cp_ring.plan.costs.waves import filled
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.routes import DEFAULT
from cp_ring.plan.schedule import NAMES, group_sizes
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.tools.cli import plan_recurrent
from cp_ring.tools.cli.option_models import parse_numbers
from cp_ring.tools.cli.terminal import mib, show_table

if TYPE_CHECKING:
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.mask import Mask
    from cp_ring.plan.plan import Plan, PlanSpec
    from cp_ring.plan.proof.verify import Report
    from cp_ring.plan.sizes.attention_sizes import AttentionSizes
    from cp_ring.plan.tables import PlanTables

MAX_RANKS_SHOWN = 32
EXPOSED_BYTES_PER_SECOND = 5e10  # a network card of 400 Gb/s
MAX_RANKS_COSTED = 64  # the speed of a rank takes about 20 ms to predict
MAX_RANKS_PREDICTED = 256  # the times of all shapes take about a second for 64 ranks
MAX_RANKS_COMPARED = 1024  # the plans of all shapes, and each rank's calls, take minutes for more

_BY_RANK = (
    "bytes_in",
    "bytes_out",
    "gradient_bytes_in",
    "gradient_bytes_out",
    "forward_flops",
    "backward_flops",
)


def summary(whole: Plan, report: Report, assumed: Assumed, num_slots: int) -> dict[str, Any]:
    """The numbers of a plan, ready for JSON. Bytes are keys and values of one forward pass."""
    plan, near = whole.ring, members_of_node(assumed.ranks_per_node, whole.ulysses)
    streams = assumed.rates.streams if assumed.kernel.concurrent else 1
    costs = cost(report, assumed.sizes.of_rank(whole.ulysses), num_slots, streams)
    return {
        "mask": plan.mask.name,
        "layout": plan.layout.name,
        "route": plan.route,
        "schedule": list(plan.schedule),
        "n": plan.n,
        "cp": plan.cp,
        "tokens_per_rank": report.tokens_per_rank.tolist(),
        "work_per_rank": report.work_per_rank.tolist(),
        **{f"{name}_per_rank": getattr(costs, name).sum(1).tolist() for name in _BY_RANK},
        "kernel_calls_per_rank": kernel_calls(plan, assumed.kernel).tolist()
        if plan.cp <= MAX_RANKS_COMPARED
        else None,
        "moving_hops_per_rank": report.moving_hops.tolist(),
        "moving_hops": int((report.keys_in.sum(0) > 0).sum()),
        "share_of_full_ring": report.share_of_full_ring,
        "share_between_nodes": between_nodes(plan, near),
        "balance": report.balance,
        "slots": report.slots,
        "memory": costs.memory,
        **_speed(whole, report, assumed),
    }


def _speed(plan: Plan, report: Report, assumed: Assumed) -> dict[str, Any]:
    """Bytes that merges, sums, casts and zero fills of each rank read and write, and predicted
    speeds.

    Both are of forward and backward. Speeds are those of the slowest rank, relative to one kernel
    call, where all ranks share a node and where each has a node of its own. None for more than
    `MAX_RANKS_COSTED` ranks.
    """
    if plan.cp > MAX_RANKS_COSTED:
        return dict.fromkeys(("accumulator_bytes_per_rank", "predicted_efficiency", "filled"))
    sizes, rates, _, kernel = assumed
    own = sizes.of_rank(plan.ulysses)
    updates = {
        rank: rank_updates(plan.rank_plan(rank * plan.ulysses), kernel)
        for rank in range(plan.ring.cp)
    }
    predicted = {}
    for name, ranks_per_node in (("nvlink", plan.cp), ("network", 1)):
        times = simulate(plan, report, sizes, rates, ranks_per_node, kernel, updates)
        predicted[name] = {"forward": times.efficiency_forward, "both": times.efficiency_both}
    grids = [updates[rank].grids for rank in sampled_ranks(plan.ring.cp)]
    return {
        "accumulator_bytes_per_rank": [
            sum(accumulator_bytes(of_rank, own)) for of_rank in updates.values()
        ],
        "predicted_efficiency": predicted,
        "filled": filled(
            grids, sizes.batch * own.heads, rates.processors, updates[0].streams(rates)
        )
        if rates.processors
        else None,
    }


def shapes_of_plan(mask: Mask, cp: int, asked: PlanSpec, assumed: Assumed) -> list[dict[str, Any]]:
    """What each shape costs in one layer; times only for up to `MAX_RANKS_PREDICTED` ranks."""
    if cp > MAX_RANKS_COMPARED:
        return []
    asked = replace(asked, route=AUTO, schedule=AUTO)
    several = 1 < cp <= MAX_RANKS_PREDICTED
    free = replace(asked, route=DEFAULT, ulysses=1, slot_shards=None)
    schedules = [replace(free, schedule=name) for name in NAMES if name != AUTO] if several else []
    shapes = []
    for shape in [*shapes_of(cp, assumed.sizes, asked), *schedules]:
        facts: dict[str, Any] = {"name": shape.name, "route": shape.route, "heads": shape.ulysses}
        facts["schedule"] = shape.schedule
        plan = planned(mask, cp, shape, assumed.rates)
        if cp > MAX_RANKS_PREDICTED:
            moved = crossing(plan, assumed.sizes, assumed.ranks_per_node)
            facts["bytes_between_nodes"] = moved.keys + moved.exchange
        else:
            costs = costed(plan, plan.verify(cp), assumed)
            facts |= costs._asdict() | {"hops": list(plan.schedule)} | costs.timeline.facts()
            del facts["timeline"]
        shapes.append(facts)
    return shapes


def times(plan: Plan, report: Report, assumed: Assumed) -> dict[str, Any] | None:
    """The predicted times of a plan; None for more than `MAX_RANKS_PREDICTED` ranks.

    `without_waves` has those that take a fixed time for each kernel call, or None.
    """
    if plan.cp > MAX_RANKS_PREDICTED:
        return None
    fixed = replace(assumed.rates, processors=0)
    in_waves, without = (
        simulate(plan, report, *assumed._replace(rates=rates)).facts()
        for rates in (assumed.rates, fixed)
    )
    return in_waves | {"without_waves": without if assumed.rates.processors else None}


def exposed(plan: Plan, report: Report, assumed: Assumed) -> dict[str, dict[str, float]] | None:
    """Predicted seconds that the slowest rank waits at 50 GB/s: of the codec, and of keys that
    travel as they are.
    """
    if plan.cp > MAX_RANKS_PREDICTED:
        return None
    rates = Rates(inside=EXPOSED_BYTES_PER_SECOND, between=EXPOSED_BYTES_PER_SECOND)
    waits = {}
    for wire in dict.fromkeys(("plain", assumed.sizes.wire)):
        sizes = replace(assumed.sizes, wire=wire)
        timeline = simulate(plan, report, *assumed._replace(sizes=sizes, rates=rates))
        waits[wire] = {"forward": timeline.exposed_forward, "both": timeline.exposed_both}
    return waits


def sparse_bytes(
    report: Report,
    layout: Layout,
    sizes: AttentionSizes,
    text: str,
) -> dict[str, float]:
    """Bytes that sparse attention moves in forward of a layer, of all ranks: the indexer's keys,
    latents, and latents of the tokens alone that the queries of a rank are expected to select,
    with a request for each; `share` is that of these tokens.

    text: the keys that a query selects, and the size of the indexer's key.
    """
    numbers = parse_numbers(text, 2)
    if numbers is None or sizes.latent is None:
        raise PlanError(f"--sparse {text}: it must be TOPK,SIZE, as 2048,128, beside --mla")
    indexer, latent = sizes.sparse_on_wire(numbers[1])
    arriving, queries = report.keys_in.sum(1), layout.tokens_per_rank
    missed = (1 - min(1.0, numbers[0] / layout.n)) ** queries
    selected = float((arriving * (1 - missed)).sum())
    total = int(arriving.sum())
    return {
        "indexer": total * indexer,
        "latents": total * latent,
        "selected": selected * (latent + 4),
        "share": selected / max(total, 1),
    }


def print_plan(plan: PlanTables, facts: dict[str, Any]) -> None:
    """Prints the numbers of a plan as tables and sentences."""
    console = Console()
    console.print(f"proven for {plan.cp} ranks: {_verdict(facts['predicted'])}", style="bold")
    _print_ranks(plan, facts)
    for line in _lines(plan, facts):
        console.print(line)
    if facts["shapes"]:
        _print_shapes(facts["shapes"], timed=facts["predicted"] is not None)
    if facts["predicted_exposed_seconds"]:
        waits = facts["predicted_exposed_seconds"].items()
        shown = [f"{wire} {1e3 * x['forward']:,.2f}, {1e3 * x['both']:,.2f}" for wire, x in waits]
        console.print(
            "predicted wait if every link had 50 GB/s, ms, forward and with backward: "
            f"{'; '.join(shown)}"
        )
    buffers = facts["memory"].items()
    show_table(
        "",
        "buffer, on the rank that needs most of it",
        ["MiB"],
        ([name, mib(size)] for name, size in buffers),
    )
    if "recurrent" in facts:
        plan_recurrent.show(facts["recurrent"])
    if "sparse" in facts:
        console.print(_sparse_line(facts["sparse"]), soft_wrap=True)


def _verdict(times: dict[str, float] | None) -> str:
    """How long a layer takes, and how much of that is waiting."""
    if times is None:
        return "too many ranks to predict the time"
    return (
        f"a layer takes {1e3 * times['forward_s']:.3g} ms forward, {1e3 * times['both_s']:.3g} ms "
        f"with backward (predicted), of which it waits {1e3 * times['exposed_both_s']:.3g} ms "
        f"({times['exposed_both_s'] / (times['both_s'] or 1):.1%}); "
        f"{times['efficiency_forward']:.3f} and {times['efficiency_both']:.3f} of the speed of one "
        "kernel call"
    )


def _print_ranks(plan: PlanTables, facts: dict[str, Any]) -> None:
    mean = sum(facts["work_per_rank"]) / plan.cp or 1
    columns = (
        facts[f"{name}_per_rank"]
        for name in ("tokens", "work", "bytes_in", "bytes_out", "moving_hops")
    )
    ranks = [*enumerate(zip(*columns, strict=True))]
    show_table(
        f"{plan.mask.describe()}; {plan.n:,} tokens on {plan.cp} ranks, {plan.layout.name} layout, "
        f"{plan.route} route",
        "",
        [
            "rank",
            "tokens",
            "work (pairs)",
            "of mean",
            "MiB in",
            "MiB out",
            "moving hops",
        ],
        (
            [
                str(rank),
                f"{tokens:,}",
                f"{work:,}",
                f"{work / mean:.3f}",
                mib(into),
                mib(out),
                str(hops),
            ]
            for rank, (tokens, work, into, out, hops) in ranks[:MAX_RANKS_SHOWN]
        ),
    )


def _lines(plan: PlanTables, facts: dict[str, Any]) -> Iterator[str]:
    if plan.cp > MAX_RANKS_SHOWN:
        yield f"... and {plan.cp - MAX_RANKS_SHOWN} more ranks (--json has all)"
    yield (
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
    yield f"remote sources of each hop: {sources}; {calls}"
    if facts["filled"]:
        shares, without = facts["filled"], facts["predicted"]["without_waves"]
        yield (
            f"its calls fill the processors to {shares['forward']:.3f} in forward and "
            f"{shares['backward']:.3f} in backward, one call of as many pairs to "
            f"{shares['one']:.3f}; with a fixed time for each call in place of that, speeds are "
            f"{without['efficiency_forward']:.3f} and {without['efficiency_both']:.3f} of one call"
        )
    if facts["chosen"]:
        yield f"chosen: {facts['chosen']}"


def _print_shapes(shapes: list[dict[str, Any]], timed: bool) -> None:
    columns = ("GiB a card", "ms", "with backward", "waits", "of one call") if timed else ()
    lines = []
    for shape in shapes:
        lines.append([shape["name"], f"{shape['bytes_between_nodes'] / 2**30:,.2f}"])
        if timed:
            ms = (1e3 * shape[name] for name in ("forward_s", "both_s", "exposed_both_s"))
            numbers = (shape["bytes_per_card"] / 2**30, *ms, shape["efficiency_both"])
            lines[-1] += [f"{number:,.2f}" for number in numbers]
    title = "one layer; bytes of forward, predicted times"
    show_table(title, "shape", ["GiB between nodes", *columns], lines)


def _sparse_line(sizes: dict[str, float]) -> str:
    """Which is less: all latents that queries see, or those selected."""
    indexer, latents, selected = (
        f"{mib(sizes[name])} MiB" for name in ("indexer", "latents", "selected")
    )
    less = "more: all travel" if sizes["selected"] >= sizes["latents"] else "less, not built"
    return (
        f"sparse attention, forward of all ranks: keys of the indexer {indexer}, latents {latents};"
        f" those selected alone ({sizes['share']:.1%}, expected) with requests {selected}, {less}"
    )
