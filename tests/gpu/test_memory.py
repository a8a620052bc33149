"""What one rank of a ring holds beyond its inputs and outputs does not grow with the number of ranks:
a device runs the rank's exact schedule, tiles, merges and slots, and what the network would deliver
is copied within the device.
"""

from __future__ import annotations

import itertools

import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.testing.oracle import Case
from tests.loopback import LoopbackTransport

N, H, G, D, E = 64, 4, 2, 16, 24


def replay(plan, rank, device="cpu", dtype=torch.float32):
    """Bytes of the peak of a rank, forward and backward, after a first time that does not count."""
    tokens = plan.rank_plan(rank).num_tokens
    case = Case.draw(tokens, h=H, g=G, d=D, e=E, dtype=dtype)
    q, k, v, dout = (x.to(device) for x in case)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    transport = LoopbackTransport(rank, plan.cp)

    def both():
        out = ring_attention(q, k, v, transport, plan=plan.rank_plan(rank))
        torch.autograd.grad(out, inputs, dout)

    both()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        both()
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def peaks(cp, schedule, mask=Mask.causal):
    """Of the first rank, one in the middle, and the last."""
    plan = Plan.build(mask(cp * N), Layout.zigzag(cp * N, cp), schedule=schedule)
    return [replay(plan, rank) for rank in (0, cp // 2, cp - 1)]


def test_memory_does_not_grow_with_ranks():
    """The same to the byte from 4 ranks to 64; 2 ranks use one slot alone."""
    few, many = peaks(4, "ring"), peaks(64, "ring")
    assert few == many
    slot = N * G * (D + E) * 4
    assert 0 <= max(many) - max(peaks(2, "ring")) < 4 * slot
    assert max(many) > 4 * slot  # it measures something


def test_memory_of_several_sources_does_not_grow_with_ranks():
    """The same to the byte as soon as two hops in succession have 4 sources: from 16 ranks on."""
    for mask in (Mask.full, Mask.causal):
        assert peaks(16, "auto", mask) == peaks(64, "auto", mask)
