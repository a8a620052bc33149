"""Probes every layer of the job: each must be built as the flags declare, and compute what the
declared layer computes.

The first layer of a kind is probed completely, see `attention_probe`. The others run forward and
backward once, on so few tokens that a model of a hundred layers takes about a second. They must
also plan long microbatches as the first one does.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cp_ring.megatron.certificate import attention_probe, value_probe
from cp_ring.megatron.certificate.layer_kinds import (
    GRAIN,
    LayerKind,
    find_layer_kinds,
    masks_of,
)
from cp_ring.megatron.certificate.probe_batch import ProbeBatch
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.megatron.certificate.tiny_model import own_device, transformer_config
from cp_ring.megatron.flags.layer_pattern import config_of_layer
from cp_ring.megatron.heads_choice import every_choice
from cp_ring.megatron.wrapping import replaced

if TYPE_CHECKING:
    from cp_ring.attention import AnyPlan


def probe_layers(args: argparse.Namespace, results: Certificate, seed: int, seconds: float) -> None:
    """Probe every kind of layer of the job over the context-parallel group in force. `seconds`
    limits the time of the probes at the job's own sequence length.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = transformer_config(args)
    if isinstance(config.window_size, int):
        results.not_covered.append("windows that core attention classes set by layer")
        config = copy.copy(config)
        config.window_size = None
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
    kinds = find_layer_kinds(args, config, masks_of(args))
    for kind in kinds:
        layers = {
            number: _make_layer(config, replace(kind, layer=number), groups)
            for number in kind.numbers
        }
        layer = layers[kind.layer]
        device = own_device()
        batch = ProbeBatch.make(kind, groups.cp, device)
        tested = TestedLayer(kind, layer, groups.cp, args.params_dtype, device, seed, batch)
        tokens = attention_probe.longest_in_time(tested, args.seq_length, seconds / len(kinds))
        long = attention_probe.at_length(tested, tokens)
        results.probes += [probe_settings(long, layers), *probe_others(tested, layers)]
        for spec in every_choice(layer.spec, groups.cp.size()):
            note = f" with heads {spec.ulysses}" if spec != layer.spec else ""
            with replaced((layer, "window", kind.probed), (layer, "spec", spec)):
                results.probes += attention_probe.probe(replace(tested, note=note))
        if tokens > kind.tokens or kind.probed != kind.window:
            results.probes += attention_probe.probe_long(long)
        if reach := _reach(args, kind, tokens):
            results.up_to[f"{kind.layer_name} under {kind.mask}"] = reach


def _reach(args: argparse.Namespace, kind: LayerKind, tokens: int) -> str:
    """Return how much of the job the probes of a kind covered, such as `512 of 4096 tokens`; "" if
    all of it.
    """
    unit = 1 if kind.mask == "causal" else 2 * args.context_parallel_size * GRAIN
    words = []
    if tokens + unit <= args.seq_length:
        words.append(f"{tokens} of {args.seq_length} tokens")
    if kind.batch_size < args.micro_batch_size and kind.mask != "packed":
        words.append(f"{kind.batch_size} of {args.micro_batch_size} batch rows")
    return " and ".join(words)


def _make_layer(config: Any, kind: LayerKind, groups: Any) -> Any:
    """Build the job's core attention of this kind of layer, as its attention layer does."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.adapter.attention import RingDotProductAttention  # imports Megatron

    sizes: dict[str, Any] = {}
    if config.multi_latent_attention:
        sizes = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    elif config.softmax_scale:
        sizes = {"softmax_scale": config.softmax_scale}
    config = config_of_layer(config, kind.layer)
    layer = RingDotProductAttention(
        config,
        kind.layer,
        AttnMaskType.causal,
        "self",
        cp_comm_type=kind.comm_type,
        pg_collection=groups,
        **sizes,
    )
    return layer.eval()


def probe_settings(tested: TestedLayer, layers: Mapping[int, Any]) -> Probe:
    """Probe that `layers`, by number, have the declared window and share one plan for the
    microbatch, which is made once.
    """
    wrong = []
    for number, layer in layers.items():
        if layer.window != tested.kind.window:
            wrong.append(f"layer {number} has window {layer.window}, declared {tested.kind.window}")
        elif _plan_of(layer, tested) is not _plan_of(tested.layer, tested):
            wrong.append(f"layer {number} has another plan")
    probe = tested.probe("settings", len(wrong), 0.0, min(wrong, default=""))
    return replace(probe, unit="layers")


def _plan_of(layer: Any, tested: TestedLayer) -> AnyPlan:
    query = tested.batch.local(tested.zeros(1, 1)).transpose(0, 1)
    return layer.plan_of(query, "causal", tested.batch.packed)


def probe_others(tested: TestedLayer, layers: Mapping[int, Any]) -> list[Probe]:
    """Compare outputs and gradients of `layers`, by number, on one short microbatch; return the
    worst layer for each tensor.
    """
    short = tested.of_kind(tested.kind.short(tested.group.size()))
    worst: dict[str, Probe] = {}
    inputs = value_probe.draw(short)
    truth = None
    for number, layer in layers.items():
        one = replace(short, kind=replace(short.kind, layer=number), layer=layer)
        one.draw_sink()
        truth = truth or value_probe.reference(one, inputs)
        window = layer.window if one.kind.probed == one.kind.window else one.kind.probed
        with replaced((layer, "window", window)):
            for probe in value_probe.compare(one, inputs, truth):
                known = worst.get(probe.name, probe)
                worst[probe.name] = max(known, probe, key=lambda each: each.badness)
    return [
        replace(probe, layer=tested.kind.layer_name, name=f"{name} of {len(layers)} layers")
        if probe.passed
        else probe
        for name, probe in worst.items()
    ]
