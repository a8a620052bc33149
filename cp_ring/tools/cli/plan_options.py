"""The options of `cp-ring plan`, and what the predictions assume by them."""

from __future__ import annotations

import importlib
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cp_ring.errors import PlanError
from cp_ring.plan.costs.shapes import Assumed
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.lower import ASSUMED, KERNELS, Capabilities
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import NAMES, SLOT_SHARDS
from cp_ring.plan.sizes.attention_sizes import WIRES, AttentionSizes, LatentSizes
from cp_ring.plan.sizes.device_rates import NAMED, RATES, Rates, named_or_read
from cp_ring.tools import lengths as samples
from cp_ring.tools.cli.option_models import (
    WRITTEN,
    argument,
    option,
    parse_mean_tokens,
    parse_numbers,
    parse_tokens,
)
from cp_ring.tools.cli.plan_inputs import PER_DOCUMENT, take

_mask, _layout, _size, _rate, _output = (
    partial(option, panel=name) for name in ("Mask", "Layout and route", "Sizes", "Rates", "Output")
)
_TOKENS: dict[str, Any] = {"parser": parse_tokens, "metavar": "TOKENS"}
_JOB: dict[str, Any] = {"is_eager": True, "callback": take}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `cp-ring plan`."""

    cp: int = _layout(0, "Context-parallel ranks; a JOB has its own.", show_default=False)
    job: str | None = argument(
        "A job's YAML file, or the name of a packaged one: options that are not given are those "
        "of its first attention layer.",
        metavar="JOB",
        **_JOB,
    )
    set_: list[str] | None = option(
        None, "Override a key of JOB, or preset=NAME. Repeatable.", "--set", metavar="A.B=C", **_JOB
    )
    seq_length: int | None = _mask(
        None,
        "Tokens of the sequence, or of the stream of packed documents; 64K and 1M work too. "
        "Some masks of --mask need none.",
        **_TOKENS,
    )
    mask: str | None = _mask(
        None,
        "shared-prefix:4096,1024x8 (a prompt, 8 responses; + begins the next group), "
        "images:100-356,1000-1256, global:0-16, tree:FILE.json, block-causal:512 or "
        "block-diffusion:512.",
        metavar="KIND:...",
    )
    window: int = _mask(
        -1, "A query sees itself and this many keys before it; -1 for all.", **_TOKENS
    )
    full: bool = _mask(False, "No causal mask: a query sees later keys too.", "--full")
    prefix: int = _mask(
        0, "Every query sees this many keys at the start of its document.", **_TOKENS
    )
    lengths: str | None = _mask(
        None,
        "Documents of these lengths: a file, lognormal:MEAN,SIGMA, or preset:NAME of "
        f"{', '.join(samples.PRESETS)}.",
        "--lengths",
        "--documents",
        metavar="SPEC",
    )
    documents_mean: float = _mask(
        0,
        "Random documents, exponential lengths of this mean; 0 for none.",
        parser=parse_mean_tokens,
        metavar="TOKENS",
    )
    seed: int = _mask(0, "Seed of the random documents.", min=0)
    layout: str = _layout("zigzag", f"{', '.join(LAYOUTS)} or {PER_DOCUMENT}.", metavar="NAME")
    convert: str | None = _layout(
        None,
        "In place of attention: bring hidden states (--heads x --head-dim numbers a token) "
        "from one layout into another, as in zigzag:contiguous.",
        metavar="BEFORE:AFTER",
    )
    recurrent: str | None = _size(
        None,
        "Beside attention: recurrent layers, gdn or mamba, whose ranks pass states or exchange "
        "heads; sizes by Megatron's names follow, as in gdn:linear_num_value_heads=32,layers=36, "
        "attention=12.",
        metavar="KIND[:NAME=VALUE,...]",
    )
    sparse: str | None = _size(
        None,
        "With --mla: sparse attention that selects so many keys, by an indexer of this head size, "
        "as 2048,128.",
        metavar="TOPK,SIZE",
    )
    chunks_per_rank: int | None = _layout(None, "Chunks per rank of the balanced layout.", min=1)
    route: str = _layout(
        "direct",
        f"{', '.join(ROUTES)}, or auto: the fastest one that --slot-shards allows.",
        metavar="NAME",
    )
    schedule: str = _layout(
        "auto",
        f"{', '.join(NAMES)}, or the hop of each ring distance as in 0,1,2,2.",
        metavar="NAME",
    )
    slot_shards: int = _layout(
        SLOT_SHARDS, "Maximum number of source ranks per hop (KV shards per receive buffer)."
    )
    num_slots: int = _layout(2, "Receive buffers for keys and values.", min=1)
    heads: int = _size(32, "Query heads.", min=1)
    kv_heads: int = _size(8, "Key/value heads; only these travel.", min=1)
    head_dim: int = _size(128, "Size of a head.", min=1)
    dtype: str = _size("bf16", "bf16, fp16 or fp32.", metavar="NAME")
    mla: str | None = _size(
        None,
        "Multi-latent attention: sizes of the latent, the rotated key, a head's own part of "
        "the key, its value, as 512,64,128,128. It replaces --kv-heads, --head-dim.",
        metavar="LATENT,ROPE,NOPE,VALUE",
    )
    wire: str = _layout("plain", f"How keys travel: {', '.join(WIRES)}.", metavar="NAME")
    ranks_per_node: int = _size(8, "Neighboring ranks on one node: node_size of a job.", min=1)
    head_parallel: str = _layout(
        "1",
        "Neighboring ranks that exchange tokens for heads: heads of a job. 1 is the ring alone, "
        "auto the fastest.",
        metavar="RANKS",
    )
    kernel: str = _rate(
        ASSUMED,
        f"The kernel whose calls are predicted: {', '.join(KERNELS)}, or a registered one.",
        metavar="NAME",
    )
    rates: str | None = _rate(
        None,
        f"{', '.join(NAMED)}, or a JSON file of rates; what it lacks is assumed.",
        "--rates",
        metavar="NAME|FILE",
    )
    tflops: float | None = _rate(
        None, f"TFLOP per second of an attention kernel; default {RATES.flops / 1e12:g}."
    )
    node_bandwidth: float | None = _rate(
        None,
        "GB per second that a rank receives from ranks of its node; default "
        f"{RATES.inside / 1e9:g}.",
    )
    network_bandwidth: float | None = _rate(
        None,
        "GB per second that a network card receives from other nodes; default "
        f"{RATES.between / 1e9:g}.",
    )
    ranks_per_card: int | None = _rate(
        None, f"Neighboring ranks that share a network card; default {RATES.ranks_per_card}."
    )
    processors: int | None = _rate(
        None,
        "Streaming multiprocessors that kernel calls fill in waves; 0 takes a fixed time for each "
        f"call instead; default {RATES.processors}.",
        min=0,
    )
    compute_streams: int = _rate(RATES.streams, "CUDA streams of kernel calls.", min=1, max=2)
    urgent: bool = _rate(
        False, "NCCL's streams have a high priority, so that calls of backward overlap.", "--urgent"
    )
    compare: bool = _output(
        False, "Compare splits of --lengths: padded, hybrid, zigzag, balanced.", "--compare"
    )
    draw: str | None = _output(None, "Write the picture to a .png, .svg or .pdf file.", **WRITTEN)
    panel: str = _output(
        "both",
        "What to draw: left (which rank computes what), right (when), both, or states (of "
        "--recurrent).",
    )
    width: float = _output(15.0, "Width of the picture in inches.")
    as_json: bool = _output(False, "Print JSON instead of the table.", "--json")

    @property
    def node_size(self) -> int:
        """Ranks of a node, by which hops are ordered: 1 where the ranks are no whole nodes."""
        return self.ranks_per_node if self.cp % self.ranks_per_node == 0 else 1

    def assumed(self) -> Assumed:
        """What the predictions assume. Raises `PlanError` that names the option."""
        kernel = capabilities_of(self.kernel)
        return Assumed(self._attention_sizes(), self._rates(), self.ranks_per_node, kernel)

    def _attention_sizes(self) -> AttentionSizes:
        """The sizes of a layer; those of `mla` are Megatron's kv_lora_rank, qk_pos_emb_head_dim,
        qk_head_dim, v_head_dim.
        """
        heads, dtype, wire, mla = self.heads, self.dtype, self.wire, self.mla
        if wire not in WIRES:
            raise PlanError(f"--wire {wire!r}: known are {', '.join(WIRES)}")
        form = "LATENT,ROPE,NOPE,VALUE, as 512,64,128,128"
        if mla is None:
            if WIRES[wire].latent:
                raise PlanError(f"--wire {wire} needs --mla {form}")
            return AttentionSizes(heads, self.kv_heads, self.head_dim, dtype=dtype, wire=wire)
        if (numbers := parse_numbers(mla, 4)) is None:
            raise PlanError(f"--mla {mla}: it must be 4 numbers of at least 1, {form}")
        latent = LatentSizes(*numbers)
        width = latent.nope + latent.rope
        return AttentionSizes(
            heads, heads, width, latent.value, dtype=dtype, wire=wire, latent=latent
        )

    def _rates(self) -> Rates:
        """The rates of a file, or those that all predictions assume, with the ones of the options
        in their place.
        """
        changes: dict[str, Any] = {"streams": self.compute_streams, "urgent": self.urgent}
        for name, flag, value, unit in (
            ("flops", "--tflops", self.tflops, 1e12),
            ("inside", "--node-bandwidth", self.node_bandwidth, 1e9),
            ("between", "--network-bandwidth", self.network_bandwidth, 1e9),
            ("ranks_per_card", "--ranks-per-card", self.ranks_per_card, 1),
        ):
            if value is not None:
                if not 0 < value < math.inf:
                    raise PlanError(f"{flag} {value:g}: it must be a number above 0")
                changes[name] = value * unit
        if self.processors is not None:
            changes["processors"] = self.processors
        return replace(RATES if self.rates is None else named_or_read(self.rates), **changes)


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
    capabilities: Capabilities = importlib.import_module(known[kernel]).KERNEL.capabilities
    return capabilities
