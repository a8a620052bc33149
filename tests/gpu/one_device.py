"""One device runs every rank of a context-parallel group in turn, with the rank's exact schedule,
tiles, merges and slots. What the network would deliver is copied within the device.
"""

import itertools

import torch

from cp_ring.api import ring_attention
from cp_ring.plan import Layout, Mask, Plan
from tests.loopback import LoopbackTransport


def replay(plan, rank, sizes):
    """Bytes of the peak beyond q, k, v, out and lse of one rank, forward and backward, after a
    first time that does not count.
    """
    transport = LoopbackTransport(rank, plan.cp)
    q, k, v, dout = sizes.draw(plan.rank_plan(rank).num_tokens)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def both():
        out = ring_attention(q, k, v, transport, plan=plan.rank_plan(rank), qkv_format="sbhd")
        torch.autograd.grad(out, inputs, dout)

    both()
    return _peak_bytes(both, torch.device(sizes.device))


def _peak_bytes(work, device):
    """The most bytes that were allocated at one time during `work`, beyond those allocated before
    it.
    """
    if device.type != "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            work()
        events = profile.profiler.kineto_results.events()
        changes = [event.nbytes() for event in events if event.name() == "[memory]"]
        return max(itertools.accumulate(changes, initial=0))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def causal_plan(cp, tokens):
    return Plan.build(Mask.causal(cp * tokens), Layout.zigzag(cp * tokens, cp))


def memory(job):
    """The peak for more and more ranks of as many tokens: it stays."""
    peaks = {}
    for cp in (2, 4, 8, 16, 32, 64) if job.values else (4, 16, 32):
        peaks[cp] = replay(causal_plan(cp, job.sizes.tokens), cp - 1, job.sizes)
        job.row(cp=cp, peak_extra_bytes=peaks[cp])
        # slots hold at most 4 shards, and two hops in succession fill theirs from cp 16 on
        if cp > 16:
            job.check("peak over that of cp 16", peaks[cp] / peaks[16], 1.01, cp=cp)
