"""`cp-ring plan`: a plan as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer

from cp_ring.bench import samples
from cp_ring.cli import job_plan
from cp_ring.cli.convert import convert_command, names_of
from cp_ring.cli.mask_option import make_mask
from cp_ring.cli.options import parse_mean_tokens, parse_tokens
from cp_ring.cli.plan_report import exposed, predicted, print_plan, shapes_of_plan, speed, summary
from cp_ring.errors import PlanError
from cp_ring.plan.compare import Layer
from cp_ring.plan.cost import AttentionSizes, cost
from cp_ring.plan.heads import members_of_node
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rates import RATES, Rates
from cp_ring.plan.rates import read as read_rates
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import NAMES, SLOT_SHARDS
from cp_ring.plan.shapes import AUTO, Shape, choose, planned
from cp_ring.plan.wires import WIRES, LatentSizes

PER_DOCUMENT = "per_document_zigzag"  # needs the documents' offsets; the layouts of LAYOUTS get only the mask
MAX_TOKENS = 1 << 30  # the proof marks each token with a byte

_MASK, _LAYOUT, _SIZES, _RATES, _OUTPUT = "Mask", "Layout and route", "Sizes", "Rates", "Output"
_TOKENS: dict[str, Any] = {"parser": parse_tokens, "metavar": "TOKENS"}
_MEAN_TOKENS: dict[str, Any] = {"parser": parse_mean_tokens, "metavar": "TOKENS"}


def plan_command(
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.", rich_help_panel=_LAYOUT)],
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", is_eager=True, callback=job_plan.take,
                       help="A job's YAML file, or the name of a packaged one: options that are not given are those of its first "
                       "attention layer."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", is_eager=True, callback=job_plan.take,
                     help="Override a key of JOB, or preset=NAME. Repeatable."),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(help="Tokens of the sequence, or of the stream of packed documents; 64K and 1M work too. Some masks "
                     "of --mask need none.", rich_help_panel=_MASK, **_TOKENS),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(metavar="KIND:...", help="shared-prefix:4096,1024x8 (a prompt, 8 responses; + begins the next group), "
                     "images:100-356,1000-1256, global:0-16, tree:FILE.json, block-causal:512 or block-diffusion:512.",
                     rich_help_panel=_MASK),
    ] = None,
    window: Annotated[
        int, typer.Option(help="A query sees itself and this many keys before it; -1 for all.", rich_help_panel=_MASK, **_TOKENS)
    ] = -1,
    full: Annotated[
        bool, typer.Option("--full", help="No causal mask: a query sees later keys too.", rich_help_panel=_MASK)
    ] = False,
    prefix: Annotated[
        int,
        typer.Option(help="Every query sees this many keys at the start of its document.", rich_help_panel=_MASK, **_TOKENS),
    ] = 0,
    documents: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File of document lengths, separated by white space.", rich_help_panel=_MASK),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Documents of these lengths: a file, lognormal:MEAN,SIGMA, or preset:NAME of "
                     f"{', '.join(samples.PRESETS)}.", rich_help_panel=_MASK),
    ] = None,
    documents_mean: Annotated[
        float,
        typer.Option(help="Random documents, exponential lengths of this mean; 0 for none.", rich_help_panel=_MASK,
                     **_MEAN_TOKENS),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random documents.", rich_help_panel=_MASK)] = 0,
    layout: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(LAYOUTS)} or {PER_DOCUMENT}.", rich_help_panel=_LAYOUT)
    ] = "zigzag",
    convert: Annotated[
        str | None,
        typer.Option(metavar="BEFORE:AFTER", help="In place of attention: bring hidden states (--heads x --head-dim numbers "
                     "a token) from one layout into another, as in zigzag:contiguous.", rich_help_panel=_LAYOUT),
    ] = None,
    chunks_per_rank: Annotated[
        int | None, typer.Option(help="Chunks per rank of the balanced layout.", rich_help_panel=_LAYOUT)
    ] = None,
    route: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"{', '.join(ROUTES)}, or auto: the fastest one that --slot-shards allows.",
                     rich_help_panel=_LAYOUT),
    ] = "direct",
    schedule: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"{', '.join(NAMES)}, or the hop of each ring distance as in 0,1,2,2.",
                     rich_help_panel=_LAYOUT),
    ] = "auto",
    slot_shards: Annotated[
        int, typer.Option(help="Sources of a hop at most: the shards of a receive buffer.", rich_help_panel=_LAYOUT)
    ] = SLOT_SHARDS,
    num_slots: Annotated[int, typer.Option(help="Receive buffers for keys and values.", rich_help_panel=_LAYOUT)] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_SIZES)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads; only these travel.", rich_help_panel=_SIZES)] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=_SIZES)] = 128,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="bf16, fp16 or fp32.", rich_help_panel=_SIZES)] = "bf16",
    mla: Annotated[
        str | None,
        typer.Option(metavar="LATENT,ROPE,NOPE,VALUE", help="Multi-latent attention: sizes of the latent, the rotated key, "
                     "a head's own part of the key, its value, as 512,64,128,128. It replaces --kv-heads, --head-dim.",
                     rich_help_panel=_SIZES),
    ] = None,
    wire: Annotated[
        str, typer.Option(metavar="NAME", help=f"How keys travel: {', '.join(WIRES)}.", rich_help_panel=_LAYOUT)
    ] = "plain",
    ranks_per_node: Annotated[int, typer.Option(help="Neighboring ranks on one node.", rich_help_panel=_SIZES)] = 8,
    head_parallel: Annotated[
        str,
        typer.Option(metavar="RANKS", help="Neighboring ranks that exchange tokens for heads; 1 is the ring alone, auto the "
                     "fastest.", rich_help_panel=_LAYOUT),
    ] = "1",
    rates: Annotated[
        str | None,
        typer.Option("--rates", metavar="FILE", help="Rates that `cp-ring bench rates --json` or preflight (links.json) has "
                     "measured; what the file lacks is assumed.", rich_help_panel=_RATES),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help=f"TFLOP per second of an attention kernel; default {RATES.flops / 1e12:g}.", rich_help_panel=_RATES),
    ] = None,
    node_bandwidth: Annotated[
        float | None,
        typer.Option(help=f"GB per second that a rank receives from ranks of its node; default {RATES.inside / 1e9:g}.",
                     rich_help_panel=_RATES),
    ] = None,
    network_bandwidth: Annotated[
        float | None,
        typer.Option(help=f"GB per second that a network card receives from other nodes; default {RATES.between / 1e9:g}.",
                     rich_help_panel=_RATES),
    ] = None,
    ranks_per_card: Annotated[
        int | None,
        typer.Option(help=f"Neighboring ranks that share a network card; default {RATES.ranks_per_card}.",
                     rich_help_panel=_RATES),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare splits of --lengths: padded, hybrid, zigzag, balanced.", rich_help_panel=_OUTPUT),
    ] = False,
    draw: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write the picture to a .png, .svg or .pdf file.", rich_help_panel=_OUTPUT),
    ] = None,
    panel: Annotated[
        str, typer.Option(help="What to draw: left (which rank computes what), right (when), or both.", rich_help_panel=_OUTPUT)
    ] = "both",
    width: Annotated[float, typer.Option(help="Width of the picture in inches.", rich_help_panel=_OUTPUT)] = 15.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:  # fmt: skip
    """Plan the attention of one layer, prove the plan, show its cost, and draw it. Needs no GPU and no process group."""
    if ranks_per_node < 1:
        raise PlanError(f"--ranks-per-node {ranks_per_node}: it must be at least 1")
    if route not in (AUTO, *ROUTES):
        raise PlanError(f"--route {route!r}: known are {', '.join((AUTO, *ROUTES))}")
    if draw:
        from cp_ring.cli.drawing import check_ending, check_panel

        check_ending(draw)
        check_panel(panel, width)
    sizes = _sizes(heads, kv_heads, head_dim, dtype, mla, wire)
    speeds = make_rates(rates, tflops, node_bandwidth, network_bandwidth, ranks_per_card)
    if convert and (compare or (layout != "zigzag" and job is None)):
        raise PlanError(f"--convert {convert} names both layouts: leave out {'--compare' if compare else '--layout'}")
    if compare:
        if lengths is None:
            raise PlanError("--compare needs --lengths: a file, lognormal:MEAN,SIGMA or preset:NAME")
        if cp < 1:
            raise PlanError(f"context parallel size {cp} must be at least 1")
        from cp_ring.cli.compare import compare_command

        drawn = samples.lengths(lengths, seq_length, seed)
        compare_command(lengths, drawn, cp, Layer(sizes, ranks_per_node=ranks_per_node, rates=speeds), as_json)
        return
    if lengths is not None:
        if documents or documents_mean:
            raise PlanError("--lengths, --documents and --documents-mean exclude one another: give one of them")
        drawn = samples.lengths(lengths, seq_length, seed)
        seq_length = int(drawn.sum()) if seq_length is None else seq_length
    with _name_options_if_out_of_memory(seq_length, cp):
        offsets = _document_offsets(seq_length, documents, documents_mean, seed)
        offsets = offsets if lengths is None else np.cumsum([0, *drawn])
        allowed = _make_mask(mask, seq_length, offsets, window, full, prefix)
        if convert:
            before, after = (
                _make_layout(name, allowed, offsets, cp, chunks_per_rank if name == "balanced" else None)
                for name in names_of(convert)
            )
            convert_command(before, after, heads * head_dim * sizes.element, ranks_per_node, as_json, draw)
            return
        chosen = _make_layout(layout, allowed, offsets, cp, chunks_per_rank)
        node_size, reason = ranks_per_node if cp % ranks_per_node == 0 else 1, None
        with _name_options(schedule="--schedule", slot_shards="--slot-shards", heads="--head-parallel"):
            count = _parse_heads(head_parallel)
            if sizes.codec.latent and count != 1:
                raise PlanError(f"--wire {wire} does not support --head-parallel {count}: latents have no heads to exchange")
            if isinstance(count, int) and route != AUTO:
                shape = Shape(route, count, schedule)
            else:
                shape, reason = choose([(allowed, 1)], cp, sizes, node_size, route=route, heads=count, schedule=schedule,
                                       slot_shards=slot_shards, layout=chosen, rates=speeds)  # fmt: skip
            limit = max(slot_shards, ranks_per_node) if ROUTES[shape.route].own_schedule else slot_shards
            whole, build_ms = _timed(lambda: planned(allowed, chosen, shape, limit, node_size, speeds))
        report, verify_ms = _timed(lambda: whole.verify(num_slots))
        shapes = shapes_of_plan(allowed, chosen, sizes, ranks_per_node, node_size, speeds, slot_shards)
    plan, own_sizes = whole.ring, sizes.of_rank(whole.ulysses)
    costs = cost(report, own_sizes, num_slots)
    facts = summary(plan, report, costs, members_of_node(ranks_per_node, shape.heads)) | speed(whole, report, sizes, speeds)
    facts |= {"build_ms": build_ms, "verify_ms": verify_ms, "head_parallel": shape.heads, "chosen": reason}
    facts |= {"bytes_between_nodes": {found["name"]: found["bytes_between_nodes"] for found in shapes}}
    facts |= {"predicted": predicted(whole, report, sizes, speeds, ranks_per_node), "shapes": shapes}
    facts |= {"wire": wire, "predicted_exposed_seconds": exposed(whole, report, sizes, ranks_per_node)}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        print_plan(plan, facts)
    if draw:
        from cp_ring.cli.drawing import draw as draw_plan

        draw_plan(whole, draw, report, own_sizes, speeds, members_of_node(ranks_per_node, shape.heads), panel, width)
        typer.echo(f"wrote {draw}", err=as_json)


def _sizes(heads: int, kv_heads: int, head_dim: int, dtype: str, mla: str | None, wire: str) -> AttentionSizes:
    """The sizes of a layer; those of `mla` are Megatron's kv_lora_rank, qk_pos_emb_head_dim, qk_head_dim and v_head_dim."""
    if wire not in WIRES:
        raise PlanError(f"--wire {wire!r}: known are {', '.join(WIRES)}")
    if mla is None:
        if WIRES[wire].latent:
            raise PlanError(f"--wire {wire} needs --mla LATENT,ROPE,NOPE,VALUE, as 512,64,128,128")
        return AttentionSizes(heads, kv_heads, head_dim, dtype=dtype, wire=wire)
    numbers = [int(x) if x.isdecimal() else 0 for x in mla.split(",")]
    if len(numbers) != 4 or min(numbers) < 1:
        raise PlanError(f"--mla {mla}: it must be 4 numbers of at least 1, LATENT,ROPE,NOPE,VALUE, as 512,64,128,128")
    latent = LatentSizes(*numbers)
    return AttentionSizes(heads, heads, latent.nope + latent.rope, latent.value, dtype=dtype, wire=wire, latent=latent)


def make_rates(
    path: str | None,
    tflops: float | None = None,
    node_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    ranks_per_card: int | None = None,
) -> Rates:
    """The rates of a file, or those that all predictions assume, with the ones of the options in their place.

    Raises `PlanError` that names the option.
    """
    options = {"flops": ("--tflops", tflops, 1e12), "inside": ("--node-bandwidth", node_bandwidth, 1e9),
               "between": ("--network-bandwidth", network_bandwidth, 1e9),
               "ranks_per_card": ("--ranks-per-card", ranks_per_card, 1)}  # fmt: skip
    for option, value, _ in options.values():
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{option} {value:g}: it must be a number above 0")
    given: dict[str, Any] = {name: value * unit for name, (_, value, unit) in options.items() if value is not None}
    return replace(RATES if path is None else read_rates(path), **given)


def _parse_heads(text: str) -> int | str:
    if text != AUTO and not (text.isdecimal() and int(text)):
        raise PlanError(f"--head-parallel {text!r}: it must be a whole number above 0, or auto")
    return text if text == AUTO else int(text)


def _document_offsets(n: int | None, path: str | None, mean: float, seed: int) -> Ints | None:
    """Offsets of the documents, int64 [documents + 1]; None for one sequence."""
    if n is None:
        if path or mean:
            raise PlanError("--documents and --documents-mean need --seq-length, the tokens of the stream")
        return None
    if not 1 <= n <= MAX_TOKENS:
        raise PlanError(f"--seq-length {n}: it must be at least 1 and at most {MAX_TOKENS}")
    if seed < 0:
        raise PlanError(f"--seed {seed}: it must be at least 0")
    if path and mean:
        raise PlanError("--documents and --documents-mean exclude one another: give one of them")
    if path:
        return samples.from_file(path, n)
    return samples.exponential(n, mean, seed) if mean else None


def _make_mask(text: str | None, n: int | None, offsets: Ints | None, window: int, full: bool, prefix: int) -> Mask:
    if text is not None:
        if full or prefix:
            raise PlanError(f"--mask {text} is a mask by itself: leave out --full and --prefix")
        return make_mask(text, n, window, offsets)
    if n is None:
        raise PlanError("--seq-length: give the tokens of the sequence, or a --mask whose parts have lengths")
    if prefix:
        lengths = prefix if offsets is None else (offsets[1:] - offsets[:-1]).clip(max=prefix)
        return Mask.prefix(n, lengths, offsets, (window, -1 if full else 0))
    if offsets is None:
        return Mask.full(n, (window, window)) if full else Mask.causal(n, (window, 0))
    return Mask.documents(offsets, causal=not full, window=(window, window if full else 0), n=n)


def _make_layout(name: str, mask: Mask, offsets: Ints | None, cp: int, chunks_per_rank: int | None) -> Layout:
    if name not in (*LAYOUTS, PER_DOCUMENT):
        raise PlanError(f"--layout {name!r}: known are {', '.join((*LAYOUTS, PER_DOCUMENT))}")
    if chunks_per_rank is not None and name != "balanced":
        raise PlanError(f"--chunks-per-rank {chunks_per_rank} is for --layout balanced, not {name}")
    if name == PER_DOCUMENT:
        return Layout.per_document_zigzag([0, mask.n] if offsets is None else offsets, cp)
    return LAYOUTS[name](mask, cp) if chunks_per_rank is None else Layout.balanced(mask, cp, chunks_per_rank)


@contextmanager
def _name_options_if_out_of_memory(n: int | None, cp: int) -> Iterator[None]:
    """Turns `MemoryError` into a `PlanError` that names the options that determine the size of the plan."""
    try:
        yield
    except MemoryError as error:
        sizes = f"--cp {cp}" if n is None else f"--seq-length {n} --cp {cp}"
        raise PlanError(f"{sizes}: the plan does not fit into memory: {error}") from None


@contextmanager
def _name_options(**options: str) -> Iterator[None]:
    """Turns parameters into their options in a `PlanError` that begins with the name of one of them."""
    try:
        yield
    except PlanError as error:
        named = str(error)
        if named.startswith(tuple(options)):
            for name, option in options.items():
                named = named.replace(name, option, 2 if name == "slot_shards" else 1)
        raise PlanError(named) from None


def _timed[T](make: Callable[[], T]) -> tuple[T, float]:
    """What `make` returns, and the milliseconds that it takes."""
    start = time.perf_counter()
    made = make()
    return made, (time.perf_counter() - start) * 1e3
