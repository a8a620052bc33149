"""The step about CUDA graphs: ring attention in a graph gives the bits of a call, on values that it
was not captured with.
"""

import time

import torch

from cp_ring import ring_attention
from cp_ring.testing.oracle import error
from tests.gpu.one_device import causal_plan
from tests.loopback import LoopbackTransport

RANK, CP = 3, 8


def captured(job):
    """A replayed rank in a graph: elements that differ from a call with the same values, and times
    of both, for each kernel.
    """
    for name in sorted({kernel.name for kernel in job.kernels()}):
        compare(job, name, False)
    compare(job, "auto", True)


def capture(call):
    """What repeats the device work of a call, forward and backward, and the tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


def compare(job, kernel, exact):
    """A graph beside calls, by one kernel; `exact` asks for determinism, with which all bits must
    be equal.
    """
    tokens = job.sizes.tokens
    plan, transport = causal_plan(CP, tokens).rank_plan(RANK), LoopbackTransport(RANK, CP)
    *values, dout = job.draw(tokens)
    inputs = [x.requires_grad_() for x in values]

    def call():
        out = ring_attention(*inputs, transport, plan=plan, kernel=kernel, deterministic=exact)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    where = {"kernel": kernel, "deterministic": exact, "cp": CP, "rank": RANK}
    replay, results = capture(call)
    with torch.no_grad():
        for old, new in zip((*inputs, dout), job.draw(tokens, seed=1), strict=True):
            old.copy_(new)
    replay()
    torch.cuda.synchronize()
    wanted = call()
    for name, got, its in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        if exact or name == "out":
            job.check(
                "elements that differ from a call", int((got != its).sum()), 0, of=name, **where
            )
        else:  # additions in another order
            job.check(
                "error norm over norm, from a call",
                error(got, its),
                1e-2,
                of=name,
                **where,
            )
    hops = len(plan.hops) + len(plan.backward)
    times = {"graph": _seconds(job, replay) / hops, "call": _seconds(job, call) / hops}
    job.row(**where, seconds_a_hop=times, graph_over_call=times["graph"] / times["call"])


def _seconds(job, work):
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(job.repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / job.repeats
