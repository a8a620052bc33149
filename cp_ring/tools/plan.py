"""`cp-ring plan`: the plan of one attention layer as a table, as JSON, and as a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.adapter.attention_sizes import attention_sizes
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.lower import ASSUMED, call_groups, lower
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rank_plan import rank_plan
from cp_ring.plan.report import Report
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import group_sizes
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.time import AttentionTime, Conditions
from cp_ring.recurrent.choice import MixerSizes
from cp_ring.recurrent.pieces import Pieces
from cp_ring.tools.lengths import packed_rows
from cp_ring.tools.terminal import (
    DEFAULT_DEVICE,
    AsJson,
    Device,
    Overrides,
    choose_for,
    emit,
    parse_tokens,
    show_table,
)

MAX_TOKENS = 1 << 26  # of a batch row; the proof of one so long takes minutes, and 4 GB
MIB = 1 << 20
MAX_RANKS_SHOWN, MAX_RANKS_COUNTED = 32, 256  # of the kernel calls of each rank


def _tokens(text: str) -> Any:
    return typer.Option(help=text, parser=parse_tokens, metavar="TOKENS")


def _number(text: str) -> Any:
    return typer.Option(metavar="N", help=text, min=1)


def plan_command(
    job: Annotated[
        str | None,
        typer.Argument(help="A job, whose first attention layer is planned.", metavar="JOB"),
    ] = None,
    overrides: Overrides = None,
    cp: Annotated[int | None, _number("Context-parallel ranks.")] = None,
    seq_length: Annotated[int | None, _tokens("Tokens of the sequence: 65536, 64K, 1M.")] = None,
    window: Annotated[int | None, _tokens("A query sees itself and so many keys before.")] = None,
    full: Annotated[bool, typer.Option("--full", help="No causal mask.")] = False,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="L", help="Packed documents: a file of lengths, or lognormal:MEAN."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(LAYOUTS)}.")
    ] = None,
    route: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(ROUTES)}. Default: direct.")
    ] = None,
    head_parallel: Annotated[
        int | None, _number("Ranks that exchange tokens for heads. Default: 1, or a JOB's.")
    ] = None,
    ranks_per_node: Annotated[int, _number("Ranks of a node, tensor-parallel ones too.")] = 8,
    heads: Annotated[int | None, _number("Query heads. Default: 32.")] = None,
    kv_heads: Annotated[int | None, _number("Key/value heads. Default: 8.")] = None,
    head_dim: Annotated[int | None, _number("Size of a head. Default: 128.")] = None,
    device: Device = DEFAULT_DEVICE,
    draw: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write the picture: a .png, .svg or .pdf file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the attention of one layer. It proves the plan, shows its cost and draws it; it needs no
    GPU.
    """
    choose_for(device)
    if seq_length is not None and seq_length < 1:
        raise PlanError(f"--seq-length {seq_length}: it must be at least 1")
    if job:
        asked = _of_job(job, overrides, ranks_per_node, cp, seq_length)
    elif not cp:
        raise PlanError("--cp: give the context-parallel ranks, or a JOB")
    elif overrides:
        raise ConfigError(f"--set {overrides[0]} changes a job: name one")
    else:
        asked = Asked(cp, seq_length, ranks_per_node=ranks_per_node)
    sizes = _changed(asked.sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    spec = _changed(asked.spec, layout=layout, route=route, ulysses=head_parallel)
    if spec.choice is not None:
        choice = None if head_parallel else replace(spec.choice, sizes=replace(sizes, batch=1))
        spec = replace(spec, choice=choice)
    asked = _changed(asked, window=window, sizes=sizes, spec=spec)
    n = asked.n
    rows, packed = packed_rows(lengths, n) if lengths is not None else ([None], "")
    masks = [make_mask(n, asked.window, full, row) for row in rows]
    if (tokens := masks[0].n) > MAX_TOKENS:
        raise PlanError(f"a batch row of {tokens} tokens: give --seq-length, at most {MAX_TOKENS}")
    assumed, compared = Conditions(asked.sizes, node=asked.ranks_per_node), []
    if lengths is not None and layout is head_parallel is None:
        compared = compare(masks, asked, assumed)
        best = compared[0]
        spec = replace(spec, layout=best["layout"], ulysses=best["head_parallel"], choice=None)
        asked = replace(asked, spec=spec)
    start = time.perf_counter()
    made = asked.spec.build(max(masks, key=Mask.area), asked.cp)
    report = made.verify(2)
    proven_ms = 1e3 * (time.perf_counter() - start)
    facts = summary(made, report, assumed) | {
        "proven_ms": proven_ms,
        "kernel_calls_per_rank": kernel_calls(made),
        "predicted": predicted(made.time(assumed)),
        "packed": packed,
        "rows": len(rows),
        "compared": compared,
        "recurrent": {
            kind: recurrent_bytes(sizes, made) for kind, sizes in asked.recurrent.items()
        },
    }
    if draw:  # first, because a reader of what is printed may end early
        from cp_ring.tools.draw import draw as draw_plan

        path = draw if Path(draw).suffix else f"{draw}.png"
        draw_plan(made, path, assumed)
    emit(facts, as_json, lambda: _print(made, facts))
    if draw:
        typer.echo(f"wrote {path}", err=as_json)


@dataclass(frozen=True)
class Asked:
    """The plan that is asked for: ranks, tokens, keys that a query sees before it (-1 for all), how
    attention is split, its sizes, and the ranks of a node.
    """

    cp: int = 0
    n: int | None = None
    window: int = -1
    spec: PlanSpec = PlanSpec("zigzag")
    sizes: AttentionSizes = field(default_factory=AttentionSizes)
    ranks_per_node: int = 8
    recurrent: Mapping[str, MixerSizes] = field(default_factory=dict)  # by the kind of layer


def compare(masks: Sequence[Mask], asked: Asked, on: Conditions) -> list[dict[str, Any]]:
    """Return the layouts and numbers of ranks that exchange heads for the masks of batch rows, each
    with the mean predicted time and the worst balance, fastest first; all plans are proven.
    """
    found = []
    for name in ("balanced", "zigzag")[: 1 + (masks[0].n >= 2 * asked.cp)]:
        for heads in [1] if on.sizes.codec.latent else on.heads_to_try(asked.cp):
            spec = replace(asked.spec, layout=name, ulysses=heads, choice=None)
            made = [spec.build(mask, asked.cp) for mask in masks]
            times = [plan.time(on) for plan in made]
            both, ideal = np.mean([(each.both, each.ideal) for each in times], 0).tolist()
            found += [
                {
                    "layout": name,
                    "head_parallel": heads,
                    "both_s": both,
                    "share_of_one_call": ideal / (both or 1),
                    "balance": max(plan.verify().balance for plan in made),
                }
            ]
    return sorted(found, key=lambda each: each["both_s"])


def _changed[T](values: T, **changes: Any) -> T:
    """Return the dataclass with the values that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(values, **given)  # type: ignore[type-var]


def _of_job(
    job: str, overrides: list[str] | None, per_node: int, cp: int | None, n: int | None
) -> Asked:
    """Return what the ranks of a job plan in its first attention layer, on nodes of `per_node`
    ranks. `cp` and `n` replace its own values.
    """
    from cp_ring.comm.nodes import node_size
    from cp_ring.megatron.adapter.asked import Asked as Arguments
    from cp_ring.megatron.adapter.heads_choice import with_choice
    from cp_ring.megatron.flags.codec_choice import fastest_wire
    from cp_ring.megatron.flags.comm_types import specs
    from cp_ring.megatron.flags.layer_pattern import RECURRENT
    from cp_ring.megatron.flags.recurrent_choice import mixers
    from cp_ring.megatron.validation import rejection
    from cp_ring.tools.job import load, megatron_flags, named_in

    loaded = load(job, overrides or ())
    given = {"context_parallel_size": cp, "seq_length": n}
    loaded.megatron.update({key: value for key, value in given.items() if value is not None})
    with named_in(loaded):
        args, settings = megatron_flags(loaded, None, "cuda")[1], loaded.cp_ring
        asked = Arguments(args)
        tp, cp = asked.tp, asked.cp
        if (args.seq_length or 0) % (2 * cp) and (line := rejection(args, loaded.ranks)):
            raise ConfigError(f"Megatron rejects it: {line}")
        near = node_size(range(0, tp * cp, tp), per_node)
        if settings.wire == "auto":
            settings = replace(settings, wire=fastest_wire(args, settings, near))
        (kind, spec), *_ = specs(args, settings)
        spec = with_choice(spec, kind, settings, args, tp, cp, near)
        recurrent = {RECURRENT[letter]: each for letter, each in mixers(asked)}
    sizes = attention_sizes(args, tp, settings.wire)
    window, _ = args.window_size or (-1, 0)
    return Asked(cp, args.seq_length, window, spec, sizes, near, recurrent)


def make_mask(n: int | None, window: int, full: bool, offsets: Ints | None) -> Mask:
    """Return the mask of `n` tokens that the options describe. offsets: of packed documents."""
    ends = window, window if full else 0
    if offsets is not None:
        return Mask.documents(offsets, causal=not full, window=ends, n=n or int(offsets[-1]))
    if n is None:
        raise PlanError("--seq-length: give the number of tokens of the sequence")
    return (Mask.full if full else Mask.causal)(n, ends)


def kernel_calls(plan: Plan) -> list[int] | None:
    """Return the kernel calls of each member of the ring in forward, by the kernel that predictions
    assume; None for many ranks.
    """
    if plan.ring.cp > MAX_RANKS_COUNTED:
        return None
    return [
        sum(len(call_groups(lower(hop.tiles, ASSUMED), ASSUMED.varlen)) for hop in part.hops)
        for part in (rank_plan(plan.ring, member) for member in range(plan.ring.cp))
    ]


def bytes_between_nodes(plan: Plan, given: Conditions) -> int:
    """Return the bytes of keys and values that the ring sends to other nodes in forward, summed
    over ranks.
    """
    near, keys = given.members(plan.ulysses), plan.ring.transfers
    crosses = keys.sender // near != keys.receiver // near
    own = given.sizes.of_rank(plan.ulysses).on_wire()[0]
    return int(keys.tokens[crosses].sum()) * own * plan.ulysses


def recurrent_bytes(sizes: MixerSizes, plan: Plan) -> dict[str, int]:
    """Return the bytes that a rank sends in forward of one recurrent layer, on average, for a batch
    row of one document: by exchange of heads, and by states.
    """
    moves = [each.moves for each in Pieces.of(plan.layout, [0], [-1]).rounds]
    maps = sum(int(x.tokens[x.sender != x.receiver].sum()) for x in moves)
    heads = sizes.exchange_bytes(plan.n // plan.cp, plan.cp)
    return {"heads": heads, "states": maps * sizes.map_bytes // plan.cp}


def predicted(times: AttentionTime) -> dict[str, float]:
    """Return the predicted times as JSON has them."""
    waits, waits_both = times.waits
    return {
        "forward_s": times.forward,
        "both_s": times.both,
        "waits_forward_s": waits,
        "waits_both_s": waits_both,
        "share_of_one_call": times.ideal / (times.both or 1),
    }


def summary(plan: Plan, report: Report, given: Conditions) -> dict[str, Any]:
    """Return the numbers of a plan, ready for JSON. Bytes are those of one layer: of keys and
    values in forward, and of gradients in backward. FLOP are those of allowed pairs: two matrix
    products in forward, five in backward.
    """
    from cp_ring.memory import memory  # which loads torch

    ring, own = plan.ring, given.sizes.of_rank(plan.ulysses)
    (keys, gradients), (forward, backward) = own.on_wire(), own.pair_flops
    amounts = {
        "bytes_in": report.keys_in * keys,
        "bytes_out": report.keys_out * keys,
        "gradient_bytes_in": report.grads_in * gradients,
        "gradient_bytes_out": report.grads_out * gradients,
        "forward_flops": report.work * float(forward),
        "backward_flops": report.work * float(backward),
    }
    return {
        "mask": ring.mask.name,
        "layout": ring.layout.name,
        "route": ring.route,
        "schedule": list(ring.schedule),
        "n": plan.n,
        "cp": plan.cp,
        "members": ring.cp,
        "tokens_per_rank": report.tokens_per_rank.tolist(),
        "work_per_rank": report.work_per_rank.tolist(),
        **{f"{name}_per_rank": table.sum(1).tolist() for name, table in amounts.items()},
        "moving_hops_per_rank": ((report.keys_in > 0) | (report.keys_out > 0)).sum(1).tolist(),
        "share_of_full_ring": report.share_of_full_ring,
        "bytes_between_nodes": bytes_between_nodes(plan, given),
        "balance": report.balance,
        "head_parallel": plan.ulysses,
        "wire": given.sizes.wire,
        "slots": report.slots,
        "memory": memory(plan, given.sizes),
    }


def _print(plan: Plan, facts: dict[str, Any]) -> None:
    ring, work = plan.ring, facts["work_per_rank"]
    mean = sum(work) / ring.cp or 1
    if facts["compared"]:
        _print_compared(facts)
    members = f" ({ring.cp} members of {plan.ulysses} that exchange heads)"
    columns = {
        "member" if plan.ulysses > 1 else "rank": range(min(ring.cp, MAX_RANKS_SHOWN)),
        "tokens": facts["tokens_per_rank"],
        "work (pairs)": work,
        "of mean": (each / mean for each in work),
        "MiB in": (each / MIB for each in facts["bytes_in_per_rank"]),
        "MiB out": (each / MIB for each in facts["bytes_out_per_rank"]),
        "moving hops": facts["moving_hops_per_rank"],
    }
    show_table(
        f"{ring.mask.describe()}; {plan.n:,} tokens on {plan.cp} ranks"
        f"{members * (plan.ulysses > 1)}, {ring.layout.name} layout, {ring.route} route",
        columns,
        zip(*columns.values(), strict=False),
    )
    for line in _lines(plan, facts):
        typer.echo(line)
    buffers = ((name, size / MIB) for name, size in facts["memory"].items())
    show_table("", ["buffer, on the rank that needs most of it", "MiB"], buffers)


def _print_compared(facts: dict[str, Any]) -> None:
    compared, rows = facts["compared"], facts["rows"]
    if facts["packed"]:
        typer.echo(f"{facts['packed']}; compared over {rows} of these rows")
    show_table(
        "predicted, fastest first; the first is planned below"
        + " for the row of most work" * (rows > 1),
        ["layout", "heads", "s with backward", "of one call's speed", "balance"],
        (each.values() for each in compared),
    )
    best = compared[0]
    typer.echo(
        f"flags: --cp-ring-layout {best['layout']} --cp-ring-heads {best['head_parallel']}; "
        "--cp-ring alone is zigzag"
    )


def _lines(plan: Plan, facts: dict[str, Any]) -> Iterator[str]:
    ring, times = plan.ring, facts["predicted"]
    if ring.cp > MAX_RANKS_SHOWN:
        yield f"... and {ring.cp - MAX_RANKS_SHOWN} more ranks (--json has all)"
    yield f"built, and proven for {plan.cp} ranks, in {facts['proven_ms']:.1f} ms"
    yield (
        f"balance {facts['balance']:.3f} (max / mean work); {facts['share_of_full_ring']:.1%} of a "
        f"full ring on the wire, {facts['bytes_between_nodes'] / 2**30:.2f} GiB between nodes in "
        "forward"
    )
    sources = ", ".join(map(str, group_sizes(ring.schedule)[:MAX_RANKS_SHOWN])) or "none"
    calls = max(facts["kernel_calls_per_rank"] or [0])
    most = f"; at most {calls} kernel calls of a rank in forward (flash)"
    yield f"remote sources of each hop: {sources}{most * (calls > 0)}"
    yield (
        f"a layer takes {1e3 * times['forward_s']:.3g} ms forward, {1e3 * times['both_s']:.3g} ms "
        f"with backward (predicted), of which it waits {1e3 * times['waits_both_s']:.3g} ms; "
        f"{times['share_of_one_call']:.3f} of the speed of one kernel call"
    )
    for kind, sent in facts["recurrent"].items():
        yield (
            f"a {kind} layer sends {sent['heads'] / MIB:,.1f} MiB a rank in forward by heads, "
            f"{sent['states'] / MIB:,.1f} by states (--cp-ring-recurrent)"
        )
