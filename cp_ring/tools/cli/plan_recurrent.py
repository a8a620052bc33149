"""`cp-ring plan --recurrent`: what recurrent layers exchange in both ways, how even a model of both
kinds of layers is, and the chain of states as a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console

from cp_ring.errors import PlanError
from cp_ring.megatron.flags.layer_pattern import letters_of, main_layers
from cp_ring.options import FORKING as FORKING
from cp_ring.plan.costs.recurrent_costs import RecurrentLayers, both_ways
from cp_ring.plan.costs.shapes import Assumed
from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.exchange.verify_chains import verify_chains
from cp_ring.plan.sizes.attention_sizes import DTYPE_BYTES
from cp_ring.tools.cli.terminal import mib, show_table

_FORM = "gdn or mamba, +, and sizes by Megatron's names, as in gdn:layers=36,attention=12"


def text_of_job(megatron: Mapping[str, Any], tp: int) -> str | None:
    """`--recurrent` for the layers of a job's section megatron; None without such layers."""
    names = ("experimental_attention_variant", "linear_attention_freq", "num_layers")
    source = argparse.Namespace(**dict.fromkeys(names) | dict(megatron))
    letters = main_layers(letters_of(source))
    attention, kinds = sum(letter not in "MG-E" for letter in letters), []
    for each in RecurrentLayers.of_model(megatron, letters):
        sizes = [f"{name}={value}" for name, value in each.settings if name not in ("bf16", "fp16")]
        counts = [f"layers={each.count}", f"attention={attention}", f"tp={tp}"]
        kinds.append(f"{each.kind}:{','.join([*counts, *sizes])}")
    return "+".join(kinds) or None


def parse(text: str, dtype: str) -> list[tuple[RecurrentLayers, int, int]]:
    """Kinds of layers, each with the number of attention layers and the tensor-parallel size.

    Raises `PlanError` that names the option.
    """
    kinds = []
    for each in text.split("+"):
        kind, _, rest = each.partition(":")
        pairs = [pair.partition("=")[::2] for pair in rest.split(",") if rest]
        if kind not in ("gdn", "mamba") or not all(value.isdecimal() for _, value in pairs):
            raise PlanError(f"--recurrent {text}: write it as {_FORM}")
        sizes = {name: int(value) for name, value in pairs}
        layers, attention, tp = (sizes.pop(name, 1) for name in ("layers", "attention", "tp"))
        prefix = {"gdn": "linear_", "mamba": "mamba_"}[kind]
        for name in sizes:
            if not name.startswith(prefix) and name != "hidden_size":
                raise PlanError(f"--recurrent {text}: {kind} layers have no {name}")
        settings = (*sizes.items(), (dtype, True))
        kinds.append((RecurrentLayers(kind, layers, settings), attention, tp))
    return kinds


def facts(text: str, chains: Chains, assumed: Assumed, flops: list[float]) -> list[dict[str, Any]]:
    """Of each kind: its layers, both ways of one of them, and max over mean of the work of ranks in
    forward, of all recurrent layers and those of attention.

    flops: of a rank, in forward of one attention layer.
    """
    kinds, entries = parse(text, assumed.sizes.dtype), []
    work = max(attention for _, attention, _ in kinds) * np.array(flops)
    for layers, _, tp in kinds:
        work += layers.count * layers.sizes(tp).token_flops * chains.layout.tokens_per_rank
    for layers, attention, tp in kinds:
        sizes = layers.sizes(tp)
        verify_chains(chains, sizes.width)
        ways = both_ways(sizes, chains, assumed.rates, assumed.ranks_per_node)
        passing = sizes.state_bytes, sizes.map_bytes, assumed.rates, assumed.ranks_per_node
        entries.append(
            {
                "kind": layers.kind,
                "layers": layers.count,
                "attention_layers": attention,
                "state_bytes": sizes.state_bytes,
                "borders": chains.links,
                "ways": {way: asdict(cost) for way, cost in ways.items()},
                "balance": float(work.max() / work.mean()),
                "passing": chains.way(*passing),
                "passing_seconds": chains.seconds(*passing),
                "exchange_element_bytes": DTYPE_BYTES[sizes.dtype],
            }
        )
    return entries


def show(kinds: list[dict[str, Any]]) -> None:
    """Prints both ways of each kind of layers."""
    ways = [(kind["kind"], *way) for kind in kinds for way in kind["ways"].items()]
    show_table(
        "one recurrent layer, forward and backward; predicted times",
        "",
        [
            "layer",
            "exchanges",
            "MiB of all ranks",
            "ms",
            "MiB of a rank",
        ],
        (
            [kind, way, mib(cost["bytes"]), f"{1e3 * cost['seconds']:.3g}", mib(cost["memory"])]
            for kind, way, cost in ways
        ),
    )
    for kind in kinds:
        Console().print(
            f"{kind['layers']} {kind['kind']} layers beside {kind['attention_layers']} of "
            f"attention: balance {kind['balance']:.3f} (max / mean work); a state of "
            f"{kind['state_bytes'] / 2**20:,.2f} MiB passes {kind['borders']} borders of ranks "
            f"({kind['passing']})",
            soft_wrap=True,
        )


def draw_chain(path: str, chains: Chains, width: float) -> None:
    """Writes a picture of the segments of ranks and of the states that pass between them."""
    from cp_ring.tools.cli.drawing import FAINT, INK, color, picture

    layout = chains.layout
    with picture(path, width, 1.2 + 0.5 * layout.cp) as figure:
        axes = figure.subplots()
        for segment, (start, end, rank) in enumerate(
            zip(chains.edges[:-1], chains.edges[1:], chains.owner, strict=True)
        ):
            shade = color(int(rank), 0, layout.cp, 1)
            axes.barh(rank, end - start, 0.5, left=start, color=shade, edgecolor="white")
            if (parent := chains.parent[segment]) >= 0 and chains.owner[parent] != rank:
                before = chains.owner[parent]
                axes.annotate(
                    "",
                    (start, rank),
                    (chains.edges[parent + 1], before),
                    arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5},
                )
        for start in chains.starts[1:]:
            axes.axvline(start, color=FAINT, linestyle=":", linewidth=1)
        axes.set_yticks(range(layout.cp), [f"rank {rank}" for rank in range(layout.cp)])
        axes.invert_yaxis()
        axes.set_xlim(0, layout.n)
        axes.set_xlabel("tokens; arrows are states, dotted lines begin anew")
        axes.set_title(
            f"{layout.n:,} tokens on {layout.cp} ranks, {layout.name} layout: "
            f"{chains.links} states pass, {int(chains.depth.max())} after one another",
            fontsize=12,
            color=INK,
        )
