"""The plan of a job's attention, before the job runs: the bytes between nodes, and the predicted time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import ConfigError
from cp_ring.job.config import JobConfig
from cp_ring.plan.cost import AttentionSizes, cost, timeline
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RingPlan
from cp_ring.slurm.placement import Placement, context_groups, describe, token_bytes, traffic

_LATENT_WIDTHS = (("qk_head_dim", 128), ("qk_pos_emb_head_dim", 64), ("v_head_dim", 128))  # Megatron's defaults


def plan_of(job: JobConfig) -> RingPlan:
    """The plan of a layer without a window, for one causal sequence. With documents, attention moves no more than this."""
    n, cp = job.megatron.get("seq_length"), job.parallel.context_parallel_size
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"megatron.seq_length {n!r}: it must be the number of tokens of a sequence")
    layout = Layout.contiguous(n, cp) if job.cp_ring.layout == "contiguous" else Layout.zigzag(n, cp)
    settings = job.cp_ring
    return RingPlan.build(Mask.causal(n), layout, settings.route, settings.schedule, settings.slot_shards)


def sizes_of(job: JobConfig) -> AttentionSizes:
    """Heads of one tensor-parallel rank, and the dtype, from Megatron's settings."""
    given, tp = job.megatron, job.parallel.tensor_model_parallel_size
    heads = int(given.get("num_attention_heads") or 1)
    groups = int(given.get("num_query_groups") or heads) if given.get("group_query_attention") else heads
    width = value_width = int(given.get("kv_channels") or int(given.get("hidden_size") or heads) // heads)
    if given.get("multi_latent_attention"):  # the ring moves the keys and values of every head, not the latents
        nope, rotary, value_width = (int(given.get(name) or default) for name, default in _LATENT_WIDTHS)
        groups, width = heads, nope + rotary
    dtype = "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "fp32"
    batch = int(given.get("micro_batch_size") or 1)
    return AttentionSizes(max(1, heads // tp), max(1, groups // tp), max(1, width), max(1, value_width), dtype=dtype, batch=batch)


def describe_job(job: JobConfig, placement: Placement) -> list[str]:
    """Lines to print: the nodes of the context-parallel ranks, and the hops between nodes."""
    cp = job.parallel.context_parallel_size
    if cp == 1:
        return ["context parallel size 1: no hops"]
    groups = context_groups(job.parallel.tensor_model_parallel_size, cp, placement.ranks)
    return describe(placement, groups, traffic(plan_of(job), groups, placement, token_bytes(sizes_of(job))))


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one layer's forward attention on the slowest rank: `compute`, and `exposed` waits for keys."""

    compute: float
    exposed: float

    @property
    def share(self) -> float:
        """The share of the time that the rank waits."""
        return self.exposed / (self.compute + self.exposed) if self.exposed else 0.0


def predict(job: JobConfig, flops_per_second: float, bytes_per_second: float) -> Prediction:
    """Predicts from measured speeds: of matrix products on the slowest rank, and of the slowest link."""
    plan = plan_of(job)
    costs = cost(plan.verify(job.cp_ring.num_slots), sizes_of(job), job.cp_ring.num_slots)
    spans, _ = timeline(plan, costs, flops_per_second, bytes_per_second)
    end, busy = np.zeros(plan.cp), np.zeros(plan.cp)
    for span in spans:
        end[span.rank] = max(end[span.rank], span.end)
        busy[span.rank] += span.end - span.start
    last = int(end.argmax())
    return Prediction(float(busy[last]), float(end[last] - busy[last]))
