"""Measurements of one GPU: values of merged passes at the sizes of training, and times of what a
ring is made of. Each row is a line of JSON; the formula of time takes its rates from these rows.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels.base import OPEN, Packing, VarlenKernel
from cp_ring.ops.segments import Segments
from cp_ring.testing.oracle import error
from tests.gpu.job import Job, RankSizes
from tests.loopback import LoopbackTransport

SCALE = 0.09
CUT = 64
"""A fake GPU has sizes this many times smaller."""
VALUES, LSE = 1e-2, 2e-3
"""Limits of errors against float64 of one tile in bf16 with a merged lse, and of its lse."""
TILES = [
    (8192, 4096, False), (4096, 8192, False), (4096, 4096, True), (8192, 8192, True),
    (8192, 16384, False), (2304, 5888, False), (8192, 1024, False), (1024, 1024, False),
    (512, 512, True),
]  # fmt: skip
"""(queries, keys, causal) of timed tiles."""


def timed(job, work, warm=3):
    """The median of ten runs in milliseconds, by events."""
    for _ in range(warm):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(10 if job.values else 1):
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)[len(found) // 2]


def tensors(job, queries, keys, h, g, seed=0):
    """q, k, v, dout [1, tokens, heads, 128]."""
    sizes = RankSizes(h=h, g=g)
    q, _, _, dout = sizes.draw(queries, seed)
    _, k, v, _ = sizes.draw(keys, seed + 1)
    return [x.transpose(0, 1).contiguous() for x in (q, k, v, dout)]


def cut(job, tokens):
    return tokens if job.values else max(tokens // CUT, 33)


def band(causal):
    return {"lo": -OPEN, "hi": 0 if causal else OPEN, "scale": SCALE}


def values(job):
    """Tiles of two heads against float64; backward with out and lse merged with 512 other keys."""
    odd = (4001, 4097, False)
    for queries, keys, causal in (*TILES[:3], TILES[5], odd):
        queries = cut(job, queries)
        keys = queries if causal else cut(job, keys)
        q, k, v, dout = tensors(job, queries, keys, 2, 1)
        _, other_k, other_v, _ = tensors(job, queries, cut(job, 512), 2, 1, seed=2)
        wide_q, wide_dout = (x[0].double().transpose(0, 1) for x in (q, dout))
        wide_k, wide_v = (
            torch.cat(pair, 1)[0].double().transpose(0, 1) for pair in ((k, other_k), (v, other_v))
        )
        scores = wide_q @ wide_k.mT * SCALE
        if causal:
            hidden = torch.ones(queries, keys, device=job.device, dtype=torch.bool).triu(1)
            scores[:, :, :keys].masked_fill_(hidden, -torch.inf)
        merged_lse = scores.logsumexp(-1)
        weight = (scores - merged_lse[..., None]).exp()
        merged = weight @ wide_v
        change = wide_dout @ wide_v.mT - (wide_dout * merged).sum(-1, keepdim=True)
        change = (weight * change * SCALE)[:, :, :keys]
        own_lse = scores[:, :, :keys].logsumexp(-1)
        own = (scores[:, :, :keys] - own_lse[..., None]).exp() @ wide_v[:, :keys]
        wanted = {
            "out": own.transpose(0, 1),
            "dq": (change @ wide_k[:, :keys]).transpose(0, 1),
            "dk": (change.mT @ wide_q).sum(0)[:, None],
            "dv": (weight[:, :, :keys].mT @ wide_dout).sum(0)[:, None],
        }
        for kernel in job.kernels():
            where = {"kernel": kernel.name, "queries": queries, "keys": keys, "causal": causal}
            out, lse = kernel.forward(q, k, v, **band(causal))
            both = merged.transpose(0, 1)[None].to(q.dtype), merged_lse[None].float()
            grads = kernel.backward(dout, q, k, v, *both, **band(causal))
            found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
            for name, truth in wanted.items():
                job.check(f"error of {name}", error(found[name][0], truth), VALUES, **where)
            of_lse = float((lse[0].double() - own_lse).abs().max())
            job.check("error of lse", of_lse, LSE, **where)


def streams(job):
    """Whether attention waits for messages that it does not need, and messages for attention: with
    one queue for all streams, as Megatron sets it, and with eight.
    """
    for connections in (1, 8):
        subprocess.run(
            [sys.executable, "-m", "tests.gpu.measure", job.step, job.kind, job.out],
            env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}, check=True,
        )  # fmt: skip


def _streams(job):
    _behind_messages(job)
    _beside_attention(job)


def _behind_messages(job):
    """When a kernel ends that was issued behind one or two messages on another stream. If behind
    two it takes one message longer, it waited for the first one to end.
    """
    cycles, little = 2_000_000 if job.values else 1, torch.zeros(1024, device=job.device)
    for priority in (0, -1):
        side = torch.cuda.Stream(priority=priority)
        for messages in (1, 2):
            for _ in range(2):  # the first one warms up
                start, computed, moved = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                torch.cuda.synchronize()
                start.record()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(messages):
                        torch.cuda._sleep(cycles)
                    moved.record()
                little.add_(1)
                computed.record()
                torch.cuda.synchronize()
            job.row(
                what="a kernel behind messages", priority=priority, messages=messages,
                connections=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
                kernel_done_ms=start.elapsed_time(computed),
                messages_done_ms=start.elapsed_time(moved),
            )  # fmt: skip


def _beside_attention(job):
    """When a copy by 32 blocks ends that becomes ready together with attention, and how long
    attention takes beside it.
    """
    source = torch.zeros(cut(job, 1 << 23), device=job.device)
    target = torch.empty_like(source)
    q, k, v, _ = tensors(job, cut(job, 8192), cut(job, 4096), 32, 8)
    for kernel in job.kernels():
        attend = partial(kernel.forward, q, k, v, **band(False))
        message = partial(target.copy_, source)
        alone = timed(job, attend), timed(job, message)
        for priority in (0, -1):
            side = torch.cuda.Stream(priority=priority)
            for first in ("message", "attention"):
                for _ in range(4):
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                    torch.cuda.synchronize()
                    torch.cuda._sleep(3_000_000 if job.values else 1)  # the host gets ahead
                    events[0].record()
                    side.wait_stream(torch.cuda.current_stream())
                    for work in (first, *({"message", "attention"} - {first})):
                        if work == "message":
                            with torch.cuda.stream(side):
                                message()
                                events[2].record()
                        else:
                            attend()
                            events[1].record()
                    torch.cuda.synchronize()
                job.row(
                    what="a message beside attention", kernel=kernel.name, priority=priority,
                    connections=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], first=first,
                    attention_ms=events[0].elapsed_time(events[1]),
                    message_done_ms=events[0].elapsed_time(events[2]), alone_ms=alone,
                )  # fmt: skip


def tiles(job):
    """TFLOP/s of tiles, and what a call takes of the host."""
    for (h, g), (queries, keys, causal) in (
        (heads, tile) for heads in ((32, 8), (4, 1)) for tile in TILES
    ):
        queries = cut(job, queries)
        keys = queries if causal else cut(job, keys)
        q, k, v, dout = tensors(job, queries, keys, h, g)
        flops = 4 * queries * keys * (0.5 if causal else 1) * 128 * h
        for kernel in job.kernels():
            attend = partial(kernel.forward, q, k, v, **band(causal))
            out, lse = attend()
            there = timed(job, attend)
            back = timed(job, partial(kernel.backward, dout, q, k, v, out, lse, **band(causal)))
            begin = time.perf_counter()
            for _ in range(20):
                attend()
            host = (time.perf_counter() - begin) / 20
            torch.cuda.synchronize()
            job.row(
                what="tile", kernel=kernel.name, h=h, queries=queries, keys=keys, causal=causal,
                ms=(there, back), host_us=host * 1e6,
                tflops=job.values and (flops / there / 1e9, 2.5 * flops / back / 1e9),
            )  # fmt: skip


def empties(job):
    """What empty tiles cost with which packed calls are filled up."""
    tokens = cut(job, 8192)
    for documents in (1, 4, 16, 32):
        length = tokens // documents
        for count in sorted({documents, 64, 256, 1024}):
            edges = [*accumulate([length] * documents, initial=0)]
            edges += edges[-1:] * (count - documents)
            ends = torch.tensor(edges, dtype=torch.int32, device=job.device)
            packing = Packing(ends, ends, length, length, -1, 0)
            q, k, v, dout = (x[0] for x in tensors(job, tokens, tokens, 32, 8))
            for kernel in job.kernels():
                if not isinstance(kernel, VarlenKernel):
                    continue
                attend = partial(kernel.forward_varlen, q, k, v, packing, SCALE)
                out, lse = attend()
                back = partial(kernel.backward_varlen, dout, q, k, v, out, lse, packing, SCALE)
                job.row(
                    what="packed call", kernel=kernel.name, documents=documents, tiles=count,
                    ms=(timed(job, attend), timed(job, back)),
                )  # fmt: skip


def merges(job):
    """GB/s of merges and sums of 1, 2 and 4 partial results."""
    from cp_ring.ops import merge_triton, sums_triton

    tokens = cut(job, 8192)
    for h in (32, 4):
        for parts in (1, 2, 4):
            for first, last in ((1, 0), (0, 0), (0, 1), (1, 1)):
                outs = [job.random(1, tokens, h, 128) for _ in range(parts)]
                lses = [torch.randn(1, h, tokens, device=job.device) for _ in outs]
                running = torch.zeros(1, tokens, h, 128, device=job.device)
                result, lse = torch.empty_like(outs[0]), torch.zeros_like(lses[0])
                segments = Segments(np.array([[0, tokens, first, last, *[0, 1] * parts]]).T)
                moved = tokens * h * 128 * (2 * parts + 4 * (not first) + (2 if last else 4))
                for name, work in {
                    "merge": partial(
                        merge_triton.merge, segments, outs, lses, running, lse, result
                    ),
                    "sum": partial(
                        sums_triton.add, segments, [[x] for x in outs], [running], [result], 1
                    ),
                }.items():
                    ms = timed(job, work)
                    job.row(
                        what=name, h=h, parts=parts, first=first, last=last, us=ms * 1e3,
                        gigabytes=job.values and moved / ms / 1e6,
                    )  # fmt: skip


def replays(job):
    """Ranks 0, 3 and 7 of 8, alone, with copies for messages: time of the device and of the host,
    and the device's by kernel. No network is in these numbers.
    """
    from torch.profiler import ProfilerActivity, profile

    n = cut(job, 8192) // 16 * 16
    masks = {
        "causal": Mask.causal(8 * n),
        "window": Mask.causal(8 * n, window=(n // 2, 0)),
        "documents": Mask.documents([*range(0, 8 * n + 1, n // 2)]),
    }
    for (name, mask), (h, g) in (
        (each, heads) for each in masks.items() for heads in ((32, 8), (4, 1))
    ):
        plan = Plan.build(mask, Layout.zigzag(8 * n, 8))
        for rank in (0, 3, 7):
            part, transport = plan.proven_part(rank), LoopbackTransport(rank, 8)
            *inputs, dout = tensors(job, n, n, h, g)
            inputs = [x.requires_grad_() for x in inputs]
            attend = partial(ring_attention, *inputs, transport, plan=part)

            def both(attend=attend, inputs=inputs, dout=dout):
                torch.autograd.grad(attend(), inputs, dout)

            forward, all_of_it = timed(job, attend), timed(job, both)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            both()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            by_kernel = Counter()
            if job.values:
                with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                    both()
                    torch.cuda.synchronize()
                for event in profiled.events():
                    by_kernel[event.name[:48]] += event.self_device_time_total
            job.row(
                what="replay", mask=name, h=h, rank=rank, hops=len(part.hops), forward_ms=forward,
                both_ms=all_of_it, host_ms=host * 1e3, us_by_kernel=dict(by_kernel.most_common(9)),
            )  # fmt: skip


if __name__ == "__main__":
    _streams(Job(*sys.argv[1:]))
