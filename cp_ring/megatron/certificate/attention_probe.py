"""Probes of one attention layer over the context-parallel group: its mask, and its outputs and
gradients against float64.

Each kind of layer is probed on a short microbatch completely, and on the job's own sequence length
at a few positions, as far as time and memory allow.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from cp_ring.megatron.certificate.layer_kinds import GRAIN, LayerKind
from cp_ring.megatron.certificate.mask_probe import mask_probes
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.megatron.certificate.value_probe import value_probes

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
PASSES = 10  # forward passes that take as long as all probes of one length
MEMORY = 1 << 30  # bytes of a probe on the CPU


def probe(tested: TestedLayer, rounds: int, samples: int | None = None) -> list[Probe]:
    """All probes on a microbatch, those of the mask in `rounds` calls; every rank of the group
    calls it. `samples`: how many queries of a rank are compared, by default all.
    """
    tested.draw_sink()
    return [*mask_probes(tested, rounds), *value_probes(tested, samples)]


def probe_long(tested: TestedLayer) -> list[Probe]:
    """As `probe`, at a few positions only, so that the references stay small;
    `tested.kind.tokens` may be large.
    """
    return probe(tested, 1, SAMPLED)


def at_length(tested: TestedLayer, tokens: int) -> TestedLayer:
    """The same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(tested.kind, tokens=tokens, probed=tested.kind.window)
    return replace(tested, kind=kind, note=f"{tested.note} at {tokens} tokens")


def longest_in_time(tested: TestedLayer, wanted: int, seconds: float) -> int:
    """The largest length up to `wanted` that `probe_long` can probe in `seconds` and in memory; all
    ranks of the job agree.

    Doubles the length and measures a forward pass each time, because the time of short ones says
    little.
    """
    unit = 2 * tested.group.size() * GRAIN
    wanted = wanted if tested.kind.mask == "causal" else wanted // unit * unit
    n = tested.kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(at_length(tested, n)) * (longer / n) ** 2
        too_large = predicted > seconds or _bytes(tested.kind, longer, tested.dtype) > _memory(
            tested.device
        )
        if _on_any_rank(too_large):
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


def _bytes(kind: LayerKind, n: int, dtype: torch.dtype) -> int:
    """At most what `probe_long` needs: whole tensors, their float64 copies, and the scores of
    sampled queries.
    """
    of_keys = 4 * kind.groups * (kind.d + kind.e) * 8
    of_queries = 2 * kind.heads * (kind.d + kind.e) * dtype.itemsize
    return n * kind.batch_size * (of_keys + of_queries + 6 * SAMPLED * kind.heads * 8)


def _memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) // 4 if device.type == "cuda" else MEMORY


def _on_any_rank(condition: bool) -> bool:
    """Whether it holds on some rank of the job, all of which probe the same lengths."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    count = torch.tensor(float(condition), device=device)
    dist.all_reduce(count)
    return bool(count)
