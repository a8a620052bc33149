"""Probes of every layer of a kind: each must be built as the flags declare, and compute what the
declared layer computes.

The first layer of a kind is probed completely, see `attention_probe`. The others run once, forward
and backward, on so few tokens that a model of a hundred layers takes about a second, and must plan
long microbatches as the first one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from cp_ring.megatron.certificate import value_probe
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.subject import Subject


def probe_built(subject: Subject, layers: Mapping[int, Any]) -> Probe:
    """Whether each of `layers`, by number, has the declared window and dropout."""
    wrong = {
        number: f"{name} {value}, declared {declared}"
        for number, layer in layers.items()
        for name, value, declared in (
            ("attention dropout", layer.dropout, layer.config.attention_dropout),
            ("window", layer.window, subject.kind.window),
        )
        if value != declared
    }
    return _of_layers(subject, "settings", wrong)


def probe_plans(subject: Subject, layers: Mapping[int, Any]) -> Probe:
    """Whether `layers`, by number, have the plan of the probed layer, which is made once, for the
    microbatch.
    """
    batch = subject.batch
    query = batch.local(subject.zeros(1, 1)).transpose(0, 1)
    declared = subject.layer.plan_of(query, "causal", batch.packed)
    wrong = {
        number: "another plan"
        for number, layer in layers.items()
        if layer.plan_of(query, "causal", batch.packed) is not declared
    }
    return _of_layers(subject, "plan", wrong)


def _of_layers(subject: Subject, name: str, wrong: Mapping[int, str]) -> Probe:
    where = [f"rank {dist.get_rank()}: layer {number} has {wrong[number]}" for number in wrong]
    return replace(subject.probe(name, len(wrong), 0.0, min(where, default="")), unit="layers")


def probe_others(subject: Subject, layers: Mapping[int, Any]) -> list[Probe]:
    """Outputs and gradients of `layers`, by number, on one short microbatch; of each tensor the
    worst layer.
    """
    short = replace(subject, kind=subject.kind.short(subject.group.size()))
    worst: dict[str, Probe] = {}
    truth = None
    for number, layer in layers.items():
        one, built = short.with_layer(number, layer), layer.window
        if one.kind.probed != subject.kind.window:
            layer.window = one.kind.probed
        if truth is None:
            inputs = value_probe.draw(one)
            truth = value_probe.reference(one, inputs)
        one.draw_sink()
        for probe in value_probe.compare(one, inputs, truth):
            known = worst.get(probe.name, probe)
            worst[probe.name] = max(known, probe, key=lambda each: each.badness)
        layer.window = built
    return [
        replace(probe, layer=subject.kind.layer_name, name=f"{name} of {len(layers)} more layers")
        if probe.passed
        else probe
        for name, probe in worst.items()
    ]
