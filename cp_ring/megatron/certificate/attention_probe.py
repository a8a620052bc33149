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
from cp_ring.megatron.certificate.subject import Subject
from cp_ring.megatron.certificate.value_probe import value_probes

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
PASSES = 10  # forward passes that take as long as all probes of one length
MEMORY = 1 << 30  # bytes of a probe on the CPU


def probe(subject: Subject, rounds: int, samples: int | None = None) -> list[Probe]:
    """All probes on a microbatch, those of the mask in `rounds` calls; every rank of the group
    calls it. `samples`: how many queries of a rank are compared, by default all.
    """
    subject.draw_sink()
    return [*mask_probes(subject, rounds), *value_probes(subject, samples)]


def probe_long(subject: Subject) -> list[Probe]:
    """As `probe`, at a few positions only, so that the references stay small;
    `subject.kind.tokens` may be large.
    """
    return probe(subject, 1, SAMPLED)


def at_length(subject: Subject, tokens: int) -> Subject:
    """The same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(subject.kind, tokens=tokens, probed=subject.kind.window)
    return replace(subject, kind=kind, note=f"{subject.note} at {tokens} tokens")


def longest_in_time(subject: Subject, wanted: int, seconds: float) -> int:
    """The largest length up to `wanted` that `probe_long` can probe in `seconds` and in memory; all
    ranks of the group agree.

    Doubles the length and measures a forward pass each time, because the time of short ones says
    little.
    """
    unit = 2 * subject.group.size() * GRAIN
    wanted = wanted if subject.kind.mask == "causal" else wanted // unit * unit
    n = subject.kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(at_length(subject, n)) * (longer / n) ** 2
        too_large = predicted > seconds or _bytes(subject.kind, longer, subject.dtype) > _memory(
            subject.device
        )
        if _on_any_rank(too_large, subject):
            return n
        n = longer
    return n


def _forward_seconds(subject: Subject) -> float:
    """How long a forward pass takes; the better of two, because the first makes the plan."""
    inputs = *subject.equal_scores(), subject.zeros(subject.kind.groups, subject.kind.e)
    times = []
    for _ in range(2):
        start = time.monotonic()
        with torch.no_grad():
            float(subject.call(*inputs).sum())  # waits for the device
        times.append(time.monotonic() - start)
    return min(times)


def _bytes(kind: LayerKind, n: int, dtype: torch.dtype) -> int:
    """At most what `probe_long` needs: whole tensors, their float64 copies, and the scores of one
    batch row's sampled queries.
    """
    of_keys = 4 * kind.groups * (kind.d + kind.e) * 8
    of_queries = 2 * kind.heads * (kind.d + kind.e) * dtype.itemsize
    return n * (kind.batch_size * (of_keys + of_queries) + 6 * SAMPLED * kind.heads * 8)


def _memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) // 4 if device.type == "cuda" else MEMORY


def _on_any_rank(condition: bool, subject: Subject) -> bool:
    device = "cuda" if dist.get_backend(subject.group) == "nccl" else "cpu"
    return bool(subject.summed(torch.tensor(float(condition), device=device)))
