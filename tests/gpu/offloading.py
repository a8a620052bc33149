"""The step about offload: the same bits, memory of the device to the byte, and time beside layers
that offload nothing.
"""

from __future__ import annotations

import contextlib
import time

import torch

from cp_ring import Offload, ring_attention
from tests.gpu.job import Job

LAYERS = 6


def offloading(job: Job) -> None:
    """Layers of attention with and without offload: gradients [same bits], bytes that the device
    holds after forward [exact].
    """
    tokens = 8192 if job.large else 64
    *case, _ = job.draw(tokens, tokens)
    case = [x.requires_grad_() for x in case]
    plain, _ = _layers(job, case, None, exact=True)
    offload = Offload(least=1)
    moved, held = _layers(job, case, offload, exact=True)
    different = sum(int((x != y).sum()) for x, y in zip(plain, moved, strict=True))
    job.check("elements of gradients that differ", different, 0)
    # q, k, v, out, lse
    layer = sum(x.nbytes for x in case) + case[0].nbytes + 4 * tokens * case[0].shape[2]
    job.check(
        "bytes in host memory after forward, beside those of all layers",
        abs(held["host"] - LAYERS * layer),
        0,
    )
    job.check("bytes fetched at a time", offload.peak, 2 * layer)
    job.check("bytes left after backward", offload.host_bytes() + offload.device_bytes(), 0)
    if job.cuda:
        # Allocations are rounded up to 512 bytes; each layer's own inputs are made anew, and only
        # saved tensors hold them.
        without = _layers(job, case, None, exact=True)[1]["device"]
        job.check("bytes that the device holds less, from those of all layers", abs(without - held[
            "device"] - LAYERS * layer),
                  LAYERS * 5 * 512)  # fmt: skip
        for name, store in (("offload", Offload()), ("none", None)):
            job.wait()
            start = time.perf_counter()
            for _ in range(job.repeats):
                _layers(job, case, store)
            job.wait()
            job.row(
                offload=name,
                seconds=(time.perf_counter() - start) / job.repeats,
                layers=LAYERS,
                tokens=tokens,
            )


def _layers(
    job: Job, case: list[torch.Tensor], offload: Offload | None, exact: bool = False
) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:  # fmt: skip
    """Gradients of q, k, v through some layers, whose inputs are made anew, and the bytes held
    after forward.

    `exact`: by a kernel whose gradients have the same bits in every run. The fastest ones add them
    up in any order.
    """
    q, k, v = case
    total, before = torch.zeros((), device=job.device), _allocated(job)
    for number in range(LAYERS):
        inputs = [x * (1 + number / 8) for x in (q, k, v)]
        with contextlib.nullcontext() if offload is None else offload.layer():
            out = ring_attention(*inputs, causal=True, deterministic=exact)
        total = total + out.float().sum()
        del inputs, out
    held = {
        "device": _allocated(job) - before,
        "host": 0 if offload is None else offload.host_bytes(),
    }
    return torch.autograd.grad(total, (q, k, v)), held


def _allocated(job: Job) -> int:
    """Bytes of live tensors on the device, after all streams have ended; 0 on the CPU."""
    job.wait()
    return torch.cuda.memory_allocated() if job.cuda else 0
