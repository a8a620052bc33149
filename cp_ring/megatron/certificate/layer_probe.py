"""Probes every attention layer of the job over the context-parallel group: each must be built as
the flags declare, and compute what the declared layer computes.

Layers of a kind run on the same short microbatch, and must share the plan of the job's own sequence
length. The first one is also probed at a few positions of that length, up to `LONG` tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.heads_choice import every_choice
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
from cp_ring.megatron.certificate.tiny_model import core_classes, own_device, transformer_config
from cp_ring.megatron.certificate.value_probe import value_probes
from cp_ring.megatron.flags.layer_pattern import config_of_layer
from cp_ring.megatron.wrapping import replaced

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
LONG = {"cpu": 2048, "cuda": 8192}  # most tokens of all these batch rows together


def probe_layers(args: argparse.Namespace, results: Certificate, seed: int) -> None:
    """Probe every kind of layer of the job over the context-parallel group in force.

    Where latents travel, layers are probed with their keys and values: the tiny model has latents.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = transformer_config(args)
    used, dtype = settings.current(), args.params_dtype
    if used.wire == "latent":
        used = replace(used, wire="plain")
        if dtype != torch.float32:
            results.not_covered.append(f"latents in {str(dtype).removeprefix('torch.')}")
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp", "hcp"])
    kinds = [kind for kind in find_layer_kinds(args, config, masks_of(args)) if kind.numbers]
    classes = core_classes(args, kinds)
    for kind in kinds:
        made = classes[kind.layer]
        with settings.in_force(used):
            layers = {
                number: _make_layer(made, config, kind, number, groups) for number in kind.numbers
            }
        first, batch = layers[kind.layer], Batch.draw(kind, groups.cp.size(), padded=True)
        tested = TestedLayer(first, groups.cp, dtype, own_device(), seed, batch)
        ring = hasattr(first, "plan_of")
        if ring:
            results.probes.append(_settings(_at_length(tested, args.seq_length), layers))
        for spec in every_choice(first.spec, groups.cp.size()) if ring else [None]:
            one, changes = tested, (("window", kind.probed), ("spec", spec)) if ring else ()
            if ring and spec != first.spec:
                one = replace(tested, note=f" with heads {spec.ulysses}")
            with replaced(*((layer, *each) for layer in layers.values() for each in changes)):
                results.probes += [*mask_probes(one, 4), *value_probes(one, layers)]
        most = min(args.seq_length, LONG[tested.device.type] // kind.batch_size)
        long = _at_length(tested, most)
        tokens = long.kind.tokens
        if tokens > kind.tokens or kind.probed != kind.window:
            with settings.in_force(used):
                alone = _make_layer(made, config, long.kind, kind.layer, groups)
            long = replace(long, layer=alone)
            probes = value_probes(long, {kind.layer: alone}, SAMPLED)
            results.probes += [*mask_probes(long, 1), *probes]
        if reach := _reach(args, kind, tokens):
            results.up_to[f"{kind.layer_name} under {kind.mask}"] = reach


def _make_layer(made: Any, config: Any, kind: LayerKind, number: int, groups: Any) -> Any:
    """Build the job's core attention of this layer, of the class `made`, as its attention layer
    does. A class other than the ring's has no window that a probe could change later.
    """
    from megatron.core.transformer.enums import AttnMaskType

    sizes: dict[str, Any] = {}
    if config.multi_latent_attention:
        sizes = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    elif config.softmax_scale:
        sizes = {"softmax_scale": config.softmax_scale}
    own = config_of_layer(config, number)
    if kind.probed != kind.window and not hasattr(made, "plan_of"):
        own = copy.copy(own)
        own.window_size, own.window_attn_skip_freq = kind.probed, None
    layer: Any = made(
        own,
        number,
        AttnMaskType.causal,
        "self",
        attention_dropout=0.0,
        cp_comm_type=kind.comm_type,
        pg_collection=groups,
        **sizes,
    )
    if kind.sink == "learnable":  # which begins near 0
        with torch.no_grad():
            layer.softmax_offset.copy_(torch.linspace(-1.0, 2.0, kind.heads))
    return layer


def _at_length(tested: TestedLayer, tokens: int) -> TestedLayer:
    """Return the same layer with its own window on batch rows of about `tokens` tokens, and not
    fewer than before.
    """
    kind, unit = tested.kind, _unit(tested.kind, tested.group.size())
    tokens = max(tokens // unit * unit, kind.tokens)
    kind = replace(kind, tokens=tokens, probed=kind.window)
    return tested.of_kind(kind, f" at {tokens} tokens")


def _unit(kind: LayerKind, cp: int) -> int:
    """Return the number of tokens of which the length of a probe's batch rows is a multiple."""
    return 1 if kind.mask == "causal" else 2 * cp * GRAIN


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
    query, declared = tested.local(tested.zeros(1, 1)).transpose(0, 1), tested.kind.window
    plan, wrong = tested.layer.plan_of(query, "causal", tested.batch.packed), []
    for number, layer in layers.items():
        if layer.window != declared:
            wrong.append(f"layer {number} has window {layer.window}, declared {declared}")
        elif layer.plan_of(query, "causal", tested.batch.packed) is not plan:
            wrong.append(f"layer {number} has another plan")
    probe = tested.probe("settings", len(wrong), 0.0, min(wrong, default=""))
    return replace(probe, unit="layers")
