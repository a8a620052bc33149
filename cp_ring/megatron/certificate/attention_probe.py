"""Probes of one attention layer over the context-parallel group: its mask, and its outputs and
gradients against float64.

Each kind of layer is probed on a short microbatch completely, and on the job's own sequence length
at a few positions, as far as time and memory allow.
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
PASSES = 10  # forward passes that take as long as all probes of one length
MEMORY = 1 << 30  # bytes of a probe on the CPU


def probe(tested: TestedLayer) -> list[Probe]:
    """All probes on a microbatch; every rank of the group calls it."""
    tested.draw_sink()
    return [*mask_probes(tested, 4), *value_probes(tested)]


def probe_long(tested: TestedLayer) -> list[Probe]:
    """As `probe`, at a few positions only, so that the references stay small;
    `tested.kind.tokens` may be large.
    """
    return [*mask_probes(tested, 1), *value_probes(tested, SAMPLED)]


def at_length(tested: TestedLayer, tokens: int) -> TestedLayer:
    """The same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(tested.kind, tokens=tokens, probed=tested.kind.window)
    return tested.of_kind(kind, f" at {tokens} tokens")


def longest_in_time(tested: TestedLayer, wanted: int, seconds: float) -> int:
    """The largest length up to `wanted` that `probe_long` can probe in `seconds` and in memory; all
    ranks of the group agree.

    Doubles the length and measures a forward pass each time, because the time of short ones says
    little.
    """
    unit = 2 * tested.group.size() * GRAIN
    wanted = wanted if tested.kind.mask == "causal" else wanted // unit * unit
    kind = tested.kind
    n = kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(at_length(tested, n)) * (longer / n) ** 2
        # whole tensors, and keys and their gradients in float64
        size = (kind.d + kind.e) * (16 * kind.heads + 32 * kind.groups)
        memory = longer * kind.batch_size * size
        too_large = predicted > seconds or memory > _memory(tested.device)
        if tested.summed(torch.tensor(float(too_large), device=tested.device)):
            return n
        n = longer
    return n


def _forward_seconds(tested: TestedLayer) -> float:
    """How long a forward pass takes; the better of two, because the first makes the plan."""
    inputs = *tested.equal_scores(), tested.zeros(tested.kind.groups, tested.kind.e)
    times = []
    for _ in range(2):
        start = time.monotonic()
        with torch.no_grad():
            float(tested.call(*inputs).sum())  # waits for the device
        times.append(time.monotonic() - start)
    return min(times)


def _memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) // 4 if device.type == "cuda" else MEMORY
