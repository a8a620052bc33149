"""Probes one attention layer over the context-parallel group: its mask, and its outputs and
gradients against float64.

Each kind of layer is probed completely on a short microbatch, and at a few positions on the job's
own sequence length, as far as time and memory allow.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from cp_ring.megatron.certificate.layer_kinds import GRAIN
from cp_ring.megatron.certificate.mask_probe import mask_probes
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.megatron.certificate.value_probe import value_probes

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
PASSES = 10  # all probes of one length take as long as this many forward passes
MEMORY = 1 << 30  # bytes that a probe may use on the CPU


def probe(tested: TestedLayer) -> list[Probe]:
    """Run all probes on a microbatch. Every rank of the group calls it."""
    tested.draw_sink()
    return [*mask_probes(tested, 4), *value_probes(tested)]


def probe_long(tested: TestedLayer) -> list[Probe]:
    """Run the probes at a few positions only, so that the references stay small and
    `tested.kind.tokens` may be large.
    """
    return [*mask_probes(tested, 1), *value_probes(tested, SAMPLED)]


def at_length(tested: TestedLayer, tokens: int) -> TestedLayer:
    """Return the same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(tested.kind, tokens=tokens, probed=tested.kind.window)
    return tested.of_kind(kind, f" at {tokens} tokens")


def longest_in_time(tested: TestedLayer, wanted: int, seconds: float) -> int:
    """Return the largest length up to `wanted` that `probe_long` can probe in `seconds` and in
    memory. All ranks of the group agree on it.

    Doubles the length and measures a forward pass each time, because the time of a short pass
    predicts little.
    """
    unit = 2 * tested.group.size() * GRAIN
    wanted = wanted if tested.kind.mask == "causal" else wanted // unit * unit
    kind = tested.kind
    on_cuda = tested.device.type == "cuda"
    free = torch.cuda.mem_get_info(tested.device)[0] // 4 if on_cuda else MEMORY
    n = kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(at_length(tested, n)) * (longer / n) ** 2
        # whole tensors, and keys and their gradients in float64
        size = (kind.d + kind.e) * (16 * kind.heads + 32 * kind.groups)
        memory = longer * kind.batch_size * size
        too_large = predicted > seconds or memory > free
        if tested.summed(torch.tensor(float(too_large), device=tested.device)):
            return n
        n = longer
    return n


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
