"""Probes of every layer of a kind: each must be built as the flags declare, and compute what the
declared layer computes.

The first layer of a kind is probed completely, see `attention_probe`. The others run once, forward
and backward, on so few tokens that a model of a hundred layers takes about a second.
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
    kind, wrong = subject.kind, ""
    count = 0
    for number, layer in layers.items():
        settings = {
            "window": (layer.window, kind.window),
            "attention dropout": (layer.dropout, layer.config.attention_dropout),
        }
        differing = [
            f"rank {dist.get_rank()}: layer {number} has {name} {value}, declared {declared}"
            for name, (value, declared) in settings.items()
            if value != declared
        ]
        if differing:
            count += 1
            wrong = wrong or differing[0]
    return replace(subject.probe("settings", float(count), 0.0, wrong), unit="layers")


def probe_others(subject: Subject, layers: Mapping[int, Any]) -> list[Probe]:
    """Outputs and gradients of `layers`, by number, on one short microbatch; of each tensor the
    worst layer.
    """
    short = replace(subject, kind=subject.kind.short(subject.group.size()))
    worst: dict[str, Probe] = {}
    truth = None
    for number, layer in layers.items():
        one = short.with_layer(number, layer)
        if one.kind.probed != subject.kind.window:
            layer.window = one.kind.probed
        if truth is None:
            inputs = value_probe.draw(one)
            truth = value_probe.reference(one, inputs)
        one.draw_sink()
        for probe in value_probe.compare(one, inputs, truth):
            before = worst.get(probe.name, probe)
            worst[probe.name] = max(before, probe, key=lambda each: each.badness)
    return [
        probe
        if not probe.passed
        else replace(
            probe, layer=subject.kind.layer_name, name=f"{name} of {len(layers)} more layers"
        )
        for name, probe in worst.items()
    ]
