"""Probes every attention layer of the job over the context-parallel group: each must be built as
the flags declare, and compute what the declared layer computes.

The first layer of a kind is probed completely on a short microbatch, and at a few positions on the
job's own sequence length, as far as time and memory allow. The others run forward and backward
once, on so few tokens that a model of a hundred layers takes about a second. They must also plan
long microbatches as the first one does.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.certificate import value_probe
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.layer_kinds import (
    GRAIN,
    LayerKind,
    find_layer_kinds,
    masks_of,
)
from cp_ring.megatron.certificate.mask_probe import mask_probes
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.megatron.certificate.tiny_model import own_device, transformer_config
from cp_ring.megatron.flags.layer_pattern import config_of_layer
from cp_ring.megatron.heads_choice import every_choice
from cp_ring.megatron.wrapping import replaced

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
PASSES = 10  # all probes of one length take as long as this many forward passes
MEMORY = 1 << 30  # bytes that a probe may use on the CPU


def probe_layers(args: argparse.Namespace, results: Certificate, seed: int, seconds: float) -> None:
    """Probe every kind of layer of the job over the context-parallel group in force. `seconds`
    limits the time of the probes at the job's own sequence length.

    Where latents travel, layers are probed with their keys and values: the tiny model has latents.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = transformer_config(args)
    if isinstance(config.window_size, int):
        results.not_covered.append("windows that core attention classes set by layer")
        config = copy.copy(config)
        config.window_size = None
    used, dtype = settings.current(), args.params_dtype
    if used.wire == "latent":
        used = replace(used, wire="plain")
        if dtype != torch.float32:
            results.not_covered.append(f"latents in {str(dtype).removeprefix('torch.')}")
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
    kinds = find_layer_kinds(args, config, masks_of(args))
    for kind in kinds:
        with settings.in_force(used):
            layers = {number: _make_layer(config, kind, number, groups) for number in kind.numbers}
        layer, batch = layers[kind.layer], Batch.draw(kind, groups.cp.size(), padded=True)
        tested = TestedLayer(layer, groups.cp, dtype, own_device(), seed, batch)
        tokens = _longest_in_time(tested, args.seq_length, seconds / len(kinds))
        long = _at_length(tested, tokens)
        results.probes += [_settings(long, layers), *_values_of_all(tested, layers)]
        for spec in every_choice(layer.spec, groups.cp.size()):
            note = f" with heads {spec.ulysses}" if spec != layer.spec else ""
            with replaced((layer, "window", kind.probed), (layer, "spec", spec)):
                one = replace(tested, note=note)
                one.draw_sink()
                results.probes += [*mask_probes(one, 4), *value_probe.value_probes(one)]
        if tokens > kind.tokens or kind.probed != kind.window:
            results.probes += [*mask_probes(long, 1), *value_probe.value_probes(long, SAMPLED)]
        if reach := _reach(args, kind, tokens):
            results.up_to[f"{kind.layer_name} under {kind.mask}"] = reach


def _make_layer(config: Any, kind: LayerKind, number: int, groups: Any) -> Any:
    """Build the job's core attention of this layer, as its attention layer does."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.adapter.attention import RingDotProductAttention  # imports Megatron

    sizes: dict[str, Any] = {}
    if config.multi_latent_attention:
        sizes = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    elif config.softmax_scale:
        sizes = {"softmax_scale": config.softmax_scale}
    return RingDotProductAttention(
        config_of_layer(config, number),
        number,
        AttnMaskType.causal,
        "self",
        cp_comm_type=kind.comm_type,
        pg_collection=groups,
        **sizes,
    ).eval()


def _at_length(tested: TestedLayer, tokens: int) -> TestedLayer:
    """Return the same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(tested.kind, tokens=tokens, probed=tested.kind.window)
    return tested.of_kind(kind, f" at {tokens} tokens")


def _longest_in_time(tested: TestedLayer, wanted: int, seconds: float) -> int:
    """Return the largest length up to `wanted` whose probes fit into `seconds` and into memory. All
    ranks of the group agree on it.

    Doubles the length and measures a forward pass each time, because the time of a short pass
    predicts little.
    """
    kind, on_cuda = tested.kind, tested.device.type == "cuda"
    unit = _unit(kind, tested.batch.cp)
    wanted = wanted // unit * unit
    free = torch.cuda.mem_get_info(tested.device)[0] // 4 if on_cuda else MEMORY
    # whole tensors, and keys and their gradients in float64
    size = kind.batch_size * (kind.d + kind.e) * (16 * kind.heads + 32 * kind.groups)
    n = kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(_at_length(tested, n)) * (longer / n) ** 2
        too_large = predicted > seconds or longer * size > free
        if tested.summed(torch.tensor(float(too_large), device=tested.device)):
            return n
        n = longer
    return n


def _unit(kind: LayerKind, cp: int) -> int:
    """Return the number of tokens of which the length of a probe's batch rows is a multiple."""
    return 1 if kind.mask == "causal" else 2 * cp * GRAIN


def _forward_seconds(tested: TestedLayer) -> float:
    """Return the seconds of a forward pass, the better of two, because the first one makes the
    plan.
    """
    inputs = *tested.equal_scores(), tested.zeros(tested.kind.groups, tested.kind.e)
    times = []
    for _ in range(2):
        start = time.monotonic()
        with torch.no_grad():
            float(tested.call(*inputs).sum())  # waits for the device
        times.append(time.monotonic() - start)
    return min(times)


def _reach(args: argparse.Namespace, kind: LayerKind, tokens: int) -> str:
    """Return how much of the job the probes of a kind covered, such as `512 of 4096 tokens`; "" if
    all of it.
    """
    words = []
    if tokens + _unit(kind, args.context_parallel_size) <= args.seq_length:
        words.append(f"{tokens} of {args.seq_length} tokens")
    if kind.batch_size < args.micro_batch_size and kind.mask != "packed":
        words.append(f"{kind.batch_size} of {args.micro_batch_size} batch rows")
    return " and ".join(words)


def _settings(tested: TestedLayer, layers: Mapping[int, Any]) -> Probe:
    """Probe that `layers`, by number, have the declared window and share one plan for the
    microbatch, which is made once.
    """
    query = tested.local(tested.zeros(1, 1)).transpose(0, 1)
    plans = {n: layer.plan_of(query, "causal", tested.packed) for n, layer in layers.items()}
    wrong = []
    for number, layer in layers.items():
        if layer.window != tested.kind.window:
            wrong.append(f"layer {number} has window {layer.window}, declared {tested.kind.window}")
        elif plans[number] is not plans[tested.kind.layer]:
            wrong.append(f"layer {number} has another plan")
    probe = tested.probe("settings", len(wrong), 0.0, min(wrong, default=""))
    return replace(probe, unit="layers")


def _values_of_all(tested: TestedLayer, layers: Mapping[int, Any]) -> list[Probe]:
    """Compare outputs and gradients of `layers`, by number, on one short microbatch; return the
    worst layer for each tensor.
    """
    short = tested.of_kind(tested.kind.short(tested.batch.cp), f" of {len(layers)} layers")
    worst: dict[str, Probe] = {}
    inputs = value_probe.draw(short)
    truth = None
    for number, layer in layers.items():
        one = replace(short, layer=layer)
        one.draw_sink()
        truth = truth or value_probe.reference(one, inputs)
        window = layer.window if one.kind.probed == one.kind.window else one.kind.probed
        with replaced((layer, "window", window)):
            for probe in value_probe.compare(one, inputs, truth):
                probe = replace(probe, where=f"layer {number}, {probe.where}")
                known = worst.get(probe.name, probe)
                worst[probe.name] = max(known, probe, key=lambda each: each.badness)
    return [*worst.values()]
