"""`cp-ring plan`: a plan as a table, as JSON, and as a picture."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import typer
from rich.console import Console

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import cost
from cp_ring.plan.costs.shapes import AUTO, Assumed, choose, planned
from cp_ring.plan.costs.splits import Layer
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.layout import LAYOUTS, Layout, NamedLayout
from cp_ring.plan.lower import ASSUMED, KERNELS, Capabilities
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.ranges import Ints
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import NAMES, SLOT_SHARDS
from cp_ring.plan.sizes.attention_sizes import WIRES, AttentionSizes, LatentSizes
from cp_ring.plan.sizes.device_rates import NAMED, RATES, Rates, named_or_read
from cp_ring.tools.bench import samples
from cp_ring.tools.cli import plan_inputs, plan_recurrent
from cp_ring.tools.cli.option_models import (
    WRITTEN,
    argument,
    option,
    parse_mean_tokens,
    parse_tokens,
)
from cp_ring.tools.cli.plan_inputs import make_mask
from cp_ring.tools.cli.plan_report import (
    exposed,
    print_plan,
    print_sparse,
    shapes_of_plan,
    sparse_bytes,
    speed,
    summary,
    times,
)
from cp_ring.tools.cli.plan_variants import convert_command, names_of

# needs the documents' offsets; the layouts of LAYOUTS get only the mask
PER_DOCUMENT = "per_document_zigzag"
MAX_TOKENS = 1 << 30  # the proof marks each token with a byte

_MASK, _LAYOUT, _SIZES = (
    {"rich_help_panel": name} for name in ("Mask", "Layout and route", "Sizes")
)
_RATES, _OUTPUT = ({"rich_help_panel": name} for name in ("Rates", "Output"))
_TOKENS: dict[str, Any] = {"parser": parse_tokens, "metavar": "TOKENS", **_MASK}
_MEAN_TOKENS: dict[str, Any] = {"parser": parse_mean_tokens, "metavar": "TOKENS", **_MASK}
_JOB: dict[str, Any] = {"is_eager": True, "callback": plan_inputs.take}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `cp-ring plan`."""

    cp: int = option(0, "Context-parallel ranks; a JOB has its own.", show_default=False, **_LAYOUT)
    job: str | None = argument(
        "A job's YAML file, or the name of a packaged one: options that are not given are those "
        "of its first attention layer.",
        metavar="JOB",
        **_JOB,
    )
    set_: list[str] | None = option(
        None, "Override a key of JOB, or preset=NAME. Repeatable.", "--set", metavar="A.B=C", **_JOB
    )
    seq_length: int | None = option(
        None,
        "Tokens of the sequence, or of the stream of packed documents; 64K and 1M work too. "
        "Some masks of --mask need none.",
        **_TOKENS,
    )
    mask: str | None = option(
        None,
        "shared-prefix:4096,1024x8 (a prompt, 8 responses; + begins the next group), "
        "images:100-356,1000-1256, global:0-16, tree:FILE.json, block-causal:512 or "
        "block-diffusion:512.",
        metavar="KIND:...",
        **_MASK,
    )
    window: int = option(
        -1, "A query sees itself and this many keys before it; -1 for all.", **_TOKENS
    )
    full: bool = option(False, "No causal mask: a query sees later keys too.", "--full", **_MASK)
    prefix: int = option(
        0, "Every query sees this many keys at the start of its document.", **_TOKENS
    )
    lengths: str | None = option(
        None,
        "Documents of these lengths: a file, lognormal:MEAN,SIGMA, or preset:NAME of "
        f"{', '.join(samples.PRESETS)}.",
        "--lengths",
        "--documents",
        metavar="SPEC",
        **_MASK,
    )
    documents_mean: float = option(
        0, "Random documents, exponential lengths of this mean; 0 for none.", **_MEAN_TOKENS
    )
    seed: int = option(0, "Seed of the random documents.", min=0, **_MASK)
    layout: str = option(
        "zigzag", f"{', '.join(LAYOUTS)} or {PER_DOCUMENT}.", metavar="NAME", **_LAYOUT
    )
    convert: str | None = option(
        None,
        "In place of attention: bring hidden states (--heads x --head-dim numbers a token) "
        "from one layout into another, as in zigzag:contiguous.",
        metavar="BEFORE:AFTER",
        **_LAYOUT,
    )
    recurrent: str | None = option(
        None,
        "Beside attention: recurrent layers, gdn or mamba, whose ranks pass states or exchange "
        "heads; sizes by Megatron's names follow, as in gdn:linear_num_value_heads=32,layers=36, "
        "attention=12.",
        metavar="KIND[:NAME=VALUE,...]",
        **_SIZES,
    )
    sparse: str | None = option(
        None,
        "With --mla: sparse attention that selects so many keys, by an indexer of this head size, "
        "as 2048,128.",
        metavar="TOPK,SIZE",
        **_SIZES,
    )
    chunks_per_rank: int | None = option(
        None, "Chunks per rank of the balanced layout.", min=1, **_LAYOUT
    )
    route: str = option(
        "direct",
        f"{', '.join(ROUTES)}, or auto: the fastest one that --slot-shards allows.",
        metavar="NAME",
        **_LAYOUT,
    )
    schedule: str = option(
        "auto",
        f"{', '.join(NAMES)}, or the hop of each ring distance as in 0,1,2,2.",
        metavar="NAME",
        **_LAYOUT,
    )
    slot_shards: int = option(
        SLOT_SHARDS,
        "Maximum number of source ranks per hop (KV shards per receive buffer).",
        **_LAYOUT,
    )
    num_slots: int = option(2, "Receive buffers for keys and values.", min=1, **_LAYOUT)
    heads: int = option(32, "Query heads.", min=1, **_SIZES)
    kv_heads: int = option(8, "Key/value heads; only these travel.", min=1, **_SIZES)
    head_dim: int = option(128, "Size of a head.", min=1, **_SIZES)
    dtype: str = option("bf16", "bf16, fp16 or fp32.", metavar="NAME", **_SIZES)
    mla: str | None = option(
        None,
        "Multi-latent attention: sizes of the latent, the rotated key, a head's own part of "
        "the key, its value, as 512,64,128,128. It replaces --kv-heads, --head-dim.",
        metavar="LATENT,ROPE,NOPE,VALUE",
        **_SIZES,
    )
    wire: str = option("plain", f"How keys travel: {', '.join(WIRES)}.", metavar="NAME", **_LAYOUT)
    ranks_per_node: int = option(
        8, "Neighboring ranks on one node: node_size of a job.", min=1, **_SIZES
    )
    head_parallel: str = option(
        "1",
        "Neighboring ranks that exchange tokens for heads: heads of a job. 1 is the ring alone, "
        "auto the fastest.",
        metavar="RANKS",
        **_LAYOUT,
    )
    kernel: str = option(
        ASSUMED,
        f"The kernel whose calls are predicted: {', '.join(KERNELS)}, or a registered one.",
        metavar="NAME",
        **_RATES,
    )
    rates: str | None = option(
        None,
        f"{', '.join(NAMED)}, or a file that `cp-ring bench rates --json` or preflight "
        "(links.json) has written; what it lacks is assumed.",
        "--rates",
        metavar="NAME|FILE",
        **_RATES,
    )
    tflops: float | None = option(
        None, f"TFLOP per second of an attention kernel; default {RATES.flops / 1e12:g}.", **_RATES
    )
    node_bandwidth: float | None = option(
        None,
        "GB per second that a rank receives from ranks of its node; default "
        f"{RATES.inside / 1e9:g}.",
        **_RATES,
    )
    network_bandwidth: float | None = option(
        None,
        "GB per second that a network card receives from other nodes; default "
        f"{RATES.between / 1e9:g}.",
        **_RATES,
    )
    ranks_per_card: int | None = option(
        None,
        f"Neighboring ranks that share a network card; default {RATES.ranks_per_card}.",
        **_RATES,
    )
    processors: int | None = option(
        None,
        "Streaming multiprocessors that kernel calls fill in waves; 0 takes a fixed time for each "
        f"call instead; default {RATES.processors}.",
        min=0,
        **_RATES,
    )
    compute_streams: int = option(
        RATES.streams, "CUDA streams of kernel calls.", min=1, max=2, **_RATES
    )
    compare: bool = option(
        False,
        "Compare splits of --lengths: padded, hybrid, zigzag, balanced.",
        "--compare",
        **_OUTPUT,
    )
    draw: str | None = option(
        None, "Write the picture to a .png, .svg or .pdf file.", **WRITTEN, **_OUTPUT
    )
    panel: str = option(
        "both",
        "What to draw: left (which rank computes what), right (when), both, or states (of "
        "--recurrent).",
        **_OUTPUT,
    )
    width: float = option(15.0, "Width of the picture in inches.", **_OUTPUT)
    as_json: bool = option(False, "Print JSON instead of the table.", "--json", **_OUTPUT)

    @property
    def node_size(self) -> int:
        """Ranks of a node, by which hops are ordered: 1 where the ranks are no whole nodes."""
        return self.ranks_per_node if self.cp % self.ranks_per_node == 0 else 1

    def assumed(self) -> Assumed:
        """What the predictions assume. Raises `PlanError` that names the option."""
        rates = make_rates(
            self.rates,
            self.tflops,
            self.node_bandwidth,
            self.network_bandwidth,
            self.ranks_per_card,
            self.processors,
        )
        rates = replace(rates, streams=self.compute_streams)
        return Assumed(_sizes(self), rates, self.ranks_per_node, capabilities_of(self.kernel))


def run_plan(request: PlanRequest) -> None:
    """Plan the attention of one layer, prove the plan, show its cost, and draw it. Needs no GPU and
    no process group.
    """
    _check(request)
    with _name_options(**{"unknown dtype": "--dtype"}):
        assumed = request.assumed()
    if request.compare:
        from cp_ring.tools.cli.plan_variants import compare_command

        if request.lengths is None:
            raise PlanError(
                "--compare needs --lengths: a file, lognormal:MEAN,SIGMA or preset:NAME"
            )
        layer = Layer(assumed.sizes, ranks_per_node=request.ranks_per_node, rates=assumed.rates)
        drawn = samples.lengths(request.lengths, request.seq_length, request.seed)
        compare_command(request.lengths, drawn, request.cp, layer, request.as_json)
        return
    n, drawn_offsets = request.seq_length, None
    if request.lengths is not None:
        if request.documents_mean:
            raise PlanError("--lengths and --documents-mean exclude one another: give one of them")
        drawn_offsets = np.cumsum([0, *samples.lengths(request.lengths, n, request.seed)])
        n = int(drawn_offsets[-1]) if n is None else n
    with (
        _name_options_if_out_of_memory(n, request.cp),
        Console(stderr=True).status(f"planning {request.cp} ranks"),
    ):
        with _name_options(documents="--documents-mean: documents"):
            offsets = _document_offsets(n, request)
        offsets = offsets if drawn_offsets is None else drawn_offsets
        mask = _make_mask(request, n, offsets)
        if request.convert:
            with _name_options(**{"--layout": "--convert"}):
                _convert(request, mask, offsets, assumed.sizes.element)
        else:
            _show(
                request,
                mask,
                _make_layout(request.layout, mask, offsets, request.cp, request.chunks_per_rank),
                assumed,
            )


def _check(request: PlanRequest) -> None:
    """Raises `PlanError` for options that contradict each other, before anything is made."""
    if request.cp < 1:
        raise PlanError(f"--cp {request.cp}: give the context-parallel ranks, at least 1, or a JOB")
    if request.route not in (AUTO, *ROUTES):
        raise PlanError(f"--route {request.route!r}: known are {', '.join((AUTO, *ROUTES))}")
    if request.draw:
        from cp_ring.tools.cli.drawing import check_ending, check_panel

        check_ending(request.draw)
        check_panel(request.panel, request.width)
    masked = request.mask and request.mask.partition(":")[0] not in plan_recurrent.FORKING
    if request.recurrent and (masked or request.full or request.prefix):
        raise PlanError(
            "--recurrent: a state runs along the sequence and branches of trees: leave out --full, "
            f"--prefix and --mask, but for {' and '.join(plan_recurrent.FORKING)}"
        )
    if request.panel == "states" and not request.recurrent:
        raise PlanError("--panel states needs --recurrent")
    if request.convert and (
        request.compare or (request.layout != "zigzag" and request.job is None)
    ):
        other = "--compare" if request.compare else "--layout"
        raise PlanError(f"--convert {request.convert} names both layouts: leave out {other}")


def _convert(request: PlanRequest, mask: Mask, offsets: Ints | None, element: int) -> None:
    before, after = (
        _make_layout(
            name, mask, offsets, request.cp, request.chunks_per_rank if _weighs(name) else None
        )
        for name in names_of(str(request.convert))
    )
    token_bytes = request.heads * request.head_dim * element
    convert_command(
        before, after, token_bytes, request.ranks_per_node, request.as_json, request.draw
    )


def _show(request: PlanRequest, mask: Mask, layout: Layout, assumed: Assumed) -> None:
    """Makes and proves the plan; prints and draws it."""
    with _name_options(schedule="--schedule", slot_shards="--slot-shards", heads="--head-parallel"):
        shape, reason = _shape(request, mask, layout, assumed)
        if ROUTES[shape.route].own_schedule:
            shape = replace(shape, slot_shards=max(request.slot_shards, request.ranks_per_node))
        plan, build_ms = _timed(lambda: planned(mask, request.cp, shape, assumed.rates))
    report, verify_ms = _timed(lambda: plan.verify(request.num_slots))
    shapes = shapes_of_plan(mask, replace(shape, slot_shards=request.slot_shards), assumed)
    ring, sizes = plan.ring, assumed.sizes.of_rank(plan.ulysses)
    streams = request.compute_streams if assumed.kernel.concurrent else 1
    near, costs = (
        members_of_node(request.ranks_per_node, shape.ulysses),
        cost(report, sizes, request.num_slots, streams),
    )
    facts = summary(ring, report, costs, near, assumed.kernel) | speed(plan, report, assumed)
    facts |= {
        "build_ms": build_ms,
        "verify_ms": verify_ms,
        "head_parallel": shape.ulysses,
        "chosen": reason,
    }
    facts |= {
        "bytes_between_nodes": {found["name"]: found["bytes_between_nodes"] for found in shapes}
    }
    facts |= {"predicted": times(plan, report, assumed), "shapes": shapes, "kernel": request.kernel}
    facts |= {"wire": request.wire, "predicted_exposed_seconds": exposed(plan, report, assumed)}
    if request.recurrent:
        chains = plan_recurrent.Chains.of_mask(layout, mask)
        # a member of the ring is `ulysses` ranks, which share its work
        flops = np.repeat(facts["forward_flops_per_rank"], shape.ulysses) / shape.ulysses
        facts["recurrent"] = plan_recurrent.facts(
            request.recurrent, chains, assumed, flops.tolist()
        )
    if request.sparse:
        facts["sparse"] = sparse_bytes(report, layout, assumed.sizes, request.sparse)
    if request.as_json:
        typer.echo(json.dumps(facts))
    else:
        print_plan(ring, facts)
        plan_recurrent.show(facts["recurrent"]) if request.recurrent else None
        print_sparse(facts["sparse"]) if request.sparse else None
    if request.draw and request.panel == "states":
        plan_recurrent.draw_chain(request.draw, chains, request.width)
        typer.echo(f"wrote {request.draw}", err=request.as_json)
    elif request.draw:
        from cp_ring.tools.cli.drawing import Look, draw

        look = Look(sizes, assumed.rates, near, request.panel, request.width)
        draw(plan, request.draw, look, report)
        typer.echo(f"wrote {request.draw}", err=request.as_json)


def _shape(
    request: PlanRequest, mask: Mask, layout: Layout, assumed: Assumed
) -> tuple[PlanSpec, str | None]:
    """The shape that was asked for; or the fastest one, and why."""
    text = request.head_parallel
    if text != AUTO and not (text.isdecimal() and int(text)):
        raise PlanError(f"--head-parallel {text!r}: it must be a whole number above 0, or auto")
    heads = text if text == AUTO else int(text)
    if assumed.sizes.codec.latent and heads != 1:
        raise PlanError(
            f"--wire {request.wire} does not support --head-parallel {heads}: latents have no "
            "heads to exchange"
        )
    asked = PlanSpec(
        layout, request.route, request.schedule, 1, request.node_size, request.slot_shards
    )
    if isinstance(heads, int) and request.route != AUTO:
        return replace(asked, ulysses=heads), None
    near = assumed._replace(ranks_per_node=request.node_size)
    return choose([(mask, 1)], request.cp, asked, near, heads)


def _sizes(request: PlanRequest) -> AttentionSizes:
    """The sizes of a layer; those of `mla` are Megatron's kv_lora_rank, qk_pos_emb_head_dim,
    qk_head_dim, v_head_dim.
    """
    heads, dtype, wire, mla = request.heads, request.dtype, request.wire, request.mla
    if wire not in WIRES:
        raise PlanError(f"--wire {wire!r}: known are {', '.join(WIRES)}")
    if mla is None:
        if WIRES[wire].latent:
            raise PlanError(f"--wire {wire} needs --mla LATENT,ROPE,NOPE,VALUE, as 512,64,128,128")
        return AttentionSizes(heads, request.kv_heads, request.head_dim, dtype=dtype, wire=wire)
    numbers = [int(x) if x.isdecimal() else 0 for x in mla.split(",")]
    if len(numbers) != 4 or min(numbers) < 1:
        raise PlanError(
            f"--mla {mla}: it must be 4 numbers of at least 1, LATENT,ROPE,NOPE,VALUE, as "
            "512,64,128,128"
        )
    latent = LatentSizes(*numbers)
    width = latent.nope + latent.rope
    return AttentionSizes(heads, heads, width, latent.value, dtype=dtype, wire=wire, latent=latent)


def capabilities_of(kernel: str) -> Capabilities:
    """What a kernel can do: one of cp_ring, or one that another package has registered.

    Raises `PlanError` that names the option.
    """
    if kernel in KERNELS:
        return KERNELS[kernel]
    known = dict.fromkeys(KERNELS, "")
    with suppress(ImportError):  # without torch
        from cp_ring.kernels import REGISTRY

        known |= REGISTRY
    if kernel not in known:
        raise PlanError(f"--kernel {kernel!r}: known are {', '.join(known)}")
    found: Capabilities = importlib.import_module(known[kernel]).KERNEL.capabilities
    return found


def make_rates(
    path: str | None,
    tflops: float | None = None,
    node_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    ranks_per_card: int | None = None,
    processors: int | None = None,
) -> Rates:
    """The rates of a file, or those that all predictions assume, with the ones of the options in
    their place.

    Raises `PlanError` that names the option.
    """
    options = {
        "flops": ("--tflops", tflops, 1e12),
        "inside": ("--node-bandwidth", node_bandwidth, 1e9),
        "between": ("--network-bandwidth", network_bandwidth, 1e9),
        "ranks_per_card": ("--ranks-per-card", ranks_per_card, 1),
    }
    for name, value, _ in options.values():
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{name} {value:g}: it must be a number above 0")
    given: dict[str, Any] = {
        name: value * unit for name, (_, value, unit) in options.items() if value is not None
    } | ({} if processors is None else {"processors": processors})
    return replace(RATES if path is None else named_or_read(path), **given)


def _document_offsets(n: int | None, request: PlanRequest) -> Ints | None:
    """Offsets of the documents, int64 [documents + 1]; None for one sequence."""
    mean, seed = request.documents_mean, request.seed
    if n is None:
        if mean:
            raise PlanError("--documents-mean needs --seq-length, the tokens of the stream")
        return None
    if not 1 <= n <= MAX_TOKENS:
        raise PlanError(f"--seq-length {n}: it must be at least 1 and at most {MAX_TOKENS}")
    return samples.exponential(n, mean, seed) if mean else None


def _make_mask(request: PlanRequest, n: int | None, offsets: Ints | None) -> Mask:
    text, window, full, prefix = request.mask, request.window, request.full, request.prefix
    if text is not None:
        if full or prefix:
            raise PlanError(f"--mask {text} is a mask by itself: leave out --full and --prefix")
        return make_mask(text, n, window, offsets)
    if n is None:
        raise PlanError(
            "--seq-length: give the tokens of the sequence, or a --mask whose parts have lengths"
        )
    if prefix:
        lengths = prefix if offsets is None else (offsets[1:] - offsets[:-1]).clip(max=prefix)
        return Mask.prefix(n, lengths, offsets, (window, -1 if full else 0))
    if offsets is None:
        return Mask.full(n, (window, window)) if full else Mask.causal(n, (window, 0))
    return Mask.documents(offsets, causal=not full, window=(window, window if full else 0), n=n)


def _weighs(name: str) -> bool:
    return name in LAYOUTS and NamedLayout.named(name).weighs


def _make_layout(
    name: str, mask: Mask, offsets: Ints | None, cp: int, chunks_per_rank: int | None
) -> Layout:
    if name not in (*LAYOUTS, PER_DOCUMENT):
        raise PlanError(f"--layout {name!r}: known are {', '.join((*LAYOUTS, PER_DOCUMENT))}")
    if chunks_per_rank is not None and not _weighs(name):
        raise PlanError(f"--chunks-per-rank {chunks_per_rank} is for --layout balanced, not {name}")
    if name == PER_DOCUMENT:
        return Layout.per_document_zigzag([0, mask.n] if offsets is None else offsets, cp)
    return (
        LAYOUTS[name](mask, cp)
        if chunks_per_rank is None
        else Layout.balanced(mask, cp, chunks_per_rank)
    )


@contextmanager
def _name_options_if_out_of_memory(n: int | None, cp: int) -> Iterator[None]:
    """Turns `MemoryError` into a `PlanError` that names the options that determine the size of the
    plan.
    """
    try:
        yield
    except MemoryError as error:
        sizes = f"--cp {cp}" if n is None else f"--seq-length {n} --cp {cp}"
        raise PlanError(f"{sizes}: the plan does not fit into memory: {error}") from None


@contextmanager
def _name_options(**options: str) -> Iterator[None]:
    """Turns parameters into their options in a `PlanError` that begins with the name of one of
    them.
    """
    try:
        yield
    except PlanError as error:
        named = str(error)
        if named.startswith(tuple(options)):
            for name, flag in options.items():
                named = named.replace(name, flag, 2 if name == "slot_shards" else 1)
        raise PlanError(named) from None


def _timed[T](make: Callable[[], T]) -> tuple[T, float]:
    """What `make` returns, and the milliseconds that it takes."""
    start = time.perf_counter()
    made = make()
    return made, (time.perf_counter() - start) * 1e3
