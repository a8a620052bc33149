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

from cp_ring.megatron.certificate import attention_probe
from cp_ring.megatron.certificate.attention_probe import Subject
from cp_ring.megatron.certificate.report import Probe


def probe_built(subject: Subject, layers: Mapping[int, Any]) -> Probe:
    """Whether each of `layers`, by number, has the declared window and dropout."""
    kind, wrong = subject.kind, ""
    count = 0
    for number, layer in layers.items():
        found = {"window": layer.window, "attention dropout": layer.dropout}
        declared = {"window": kind.window, "attention dropout": layer.config.attention_dropout}
        differing = [name for name in found if found[name] != declared[name]]
        if differing:
            count += 1
            name = differing[0]
            wrong = (
                wrong
                or f"rank {dist.get_rank()}: layer {number} has {name} {found[name]}, declared "
                f"{declared[name]}"
            )
    return replace(subject.probe("settings", float(count), 0.0, wrong), unit="layers")


def probe_others(subject: Subject, layers: Mapping[int, Any], seed: int) -> list[Probe]:
    """Outputs and gradients of `layers`, by number, on one short microbatch; of each tensor the
    worst layer.
    """
    worst: dict[str, Probe] = {}
    truth = None
    for number, layer in layers.items():
        one = replace(subject, layer=layer, kind=subject.kind.short(number, subject.group.size()))
        if one.kind.probed != subject.kind.window:
            layer.window = one.kind.probed
        if truth is None:
            batch, inputs, truth = attention_probe.prepare(one, seed)
        for probe in attention_probe.probe_values(one, batch, inputs, truth, seed):
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
