"""Probes every attention layer of the job over the context-parallel group: each must be built as
the flags declare, and compute what the declared layer computes.

Layers of a kind run on the same short microbatch, and must share the plan of the job's own sequence
length. The first one is also probed at a few positions of that length, up to `LONG` tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.heads_choice import every_choice
from cp_ring.megatron.certificate.attention_probes import ExaminedLayers, probes
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.layer_kinds import (
    GRAIN,
    LayerKind,
    find_layer_kinds,
    masks_of,
)
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tiny_model import core_classes, own_device, transformer_config
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
    with settings.in_force(used):
        for kind in kinds:
            made = partial(_make_layer, classes[kind.layer], config, groups)
            batch = Batch.draw(kind, groups.cp.size(), padded=True)
            layers = {number: made(kind, number) for number in kind.numbers}
            tested = ExaminedLayers(layers, groups.cp, dtype, own_device(), seed, batch)
            if hasattr(tested.first, "plan_of"):
                results.probes += _ring_probes(tested, args.seq_length)
            else:
                results.probes += probes(tested, 4)
            most = min(args.seq_length, LONG[tested.device.type] // kind.batch_size)
            long = _at_length(tested, most)
            tokens = long.kind.tokens
            if tokens > kind.tokens or kind.probed != kind.window:
                long = replace(long, layers={kind.layer: made(long.kind, kind.layer)})
                results.probes += probes(long, 1, SAMPLED)
            grain = 2 * groups.cp.size() * GRAIN
            if tokens // grain < args.seq_length // grain:
                reach = f"{tokens} of {args.seq_length} tokens"
                results.up_to[f"{kind.layer_name} under {kind.mask}"] = reach


def _ring_probes(tested: ExaminedLayers, n: int) -> Iterator[Probe]:
    """Probe ring attention: its settings at the job's own length `n`, then masks and values with
    each number of heads that a plan may choose.
    """
    yield _settings(_at_length(tested, n))
    own = tested.first.spec
    for spec in every_choice(own, tested.group.size()):
        one = tested if spec == own else replace(tested, note=f" with heads {spec.ulysses}")
        changes = ("window", tested.kind.probed), ("spec", spec)
        with replaced(*((layer, *each) for layer in tested.layers.values() for each in changes)):
            yield from probes(one, 4)


def _make_layer(made: Any, config: Any, groups: Any, kind: LayerKind, number: int) -> Any:
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


def _at_length(tested: ExaminedLayers, tokens: int) -> ExaminedLayers:
    """Return the same layers with their own window on batch rows of about `tokens` tokens, and not
    fewer than before.
    """
    kind, cp = tested.kind, tested.group.size()
    unit = 1 if kind.mask == "causal" else 2 * cp * GRAIN
    tokens = max(tokens // unit * unit, kind.tokens)
    batch = Batch.draw(replace(kind, tokens=tokens, probed=kind.window), cp, padded=True)
    return replace(tested, batch=batch, note=f" at {tokens} tokens")


def _settings(tested: ExaminedLayers) -> Probe:
    """Probe that the layers have the declared window and share one plan for the microbatch, which
    is made once.
    """
    query, declared = tested.local(tested.zeros(1, 1)).transpose(0, 1), tested.kind.window
    plan, wrong = tested.first.plan_of(query, "causal", tested.batch.packed), []
    for number, layer in tested.layers.items():
        if layer.window != declared:
            wrong.append(f"layer {number} has window {layer.window}, declared {declared}")
        elif layer.plan_of(query, "causal", tested.batch.packed) is not plan:
            wrong.append(f"layer {number} has another plan")
    probe = tested.probe("settings", len(wrong), 0.0, min(wrong, default=""))
    return replace(probe, unit="layers")
