"""Steps on single tiles: their accuracy against float64, their speed, and packed calls beside dense
ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels import AttentionKernel, determinism
from cp_ring.kernels.base import OPEN, Packing
from cp_ring.ops.merge import merge_
from cp_ring.testing.oracle import error
from tests.gpu.job import ERRORS, Job
from tests.gpu.one_device import _seconds, single_call
from tests.plan import samples

LSE_ERROR = 2e-3


@dataclass
class Tile:
    """Tensors [1, tokens, heads, size] of one tile; `causal` is aligned top left."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool

    @classmethod
    def draw(cls, job: Job, queries: int, keys: int, causal: bool) -> Tile:
        return cls(*job.draw(queries, keys), causal)

    @property
    def name(self) -> str:
        return f"{'causal ' if self.causal else ''}{self.q.shape[1]} x {self.k.shape[1]}"

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def pairs(self) -> float:
        queries, keys = self.q.shape[1], self.k.shape[1]
        return queries * (keys + 1) / 2 if self.causal else queries * keys

    def flops(self) -> float:
        """Of forward: two products of every pair in every head. Backward has five."""
        return 2 * self.pairs * self.q.shape[2] * (self.q.shape[3] + self.v.shape[3])

    def forward(self, kernel: AttentionKernel) -> tuple[Tensor, Tensor]:
        return kernel.forward(
            self.q, self.k, self.v, lo=-OPEN, hi=0 if self.causal else OPEN, scale=self.scale
        )

    def backward(self, kernel: AttentionKernel, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        band = {"lo": -OPEN, "hi": 0 if self.causal else OPEN}
        return kernel.backward(
            self.dout, self.q, self.k, self.v, out, lse, **band, scale=self.scale
        )

    @property
    def packing(self) -> Packing:
        queries, keys = self.q.shape[1], self.k.shape[1]
        ends = (
            torch.tensor([0, x], dtype=torch.int32, device=self.q.device) for x in (queries, keys)
        )
        return Packing(*ends, queries, keys, -1, 0 if self.causal else -1)

    def forward_packed(self, kernel: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward_varlen(self.q[0], self.k[0], self.v[0], self.packing, self.scale)
        return out[None], lse[None]

    def backward_packed(self, kernel: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        tensors = (x[0] for x in (self.dout, self.q, self.k, self.v, out))
        return tuple(
            x[None] for x in kernel.backward_varlen(*tensors, lse[0], self.packing, self.scale)
        )


def paths(job: Job, tile: Tile) -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Name, forward and backward of every way to compute a tile: TransformerEngine packed (thd)
    too.
    """
    found = []
    for kernel in job.kernels():
        found.append((kernel.name, partial(tile.forward, kernel), partial(tile.backward, kernel)))
        if kernel.name == "transformer_engine":
            packed = partial(tile.forward_packed, kernel), partial(tile.backward_packed, kernel)
            found.append((f"{kernel.name}, thd", *packed))
    return found


def truth(tile: Tile, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, out and lse of a query head in float64, from plain products."""
    group = head // (tile.q.shape[2] // tile.k.shape[2])
    q, k, v = (
        tile.q[0, :, head].double(),
        tile.k[0, :, group].double(),
        tile.v[0, :, group].double(),
    )
    scores = (q @ k.T) * tile.scale
    if tile.causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return scores, (scores - lse[:, None]).exp() @ v, lse


def true_gradients(
    tile: Tile, group: int, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq of the query heads of a key/value head, its dk and dv, in float64, from the merged out and
    lse.
    """
    heads = tile.q.shape[2] // tile.k.shape[2]
    k, v = tile.k[0, :, group].double(), tile.v[0, :, group].double()
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for head in range(group * heads, (group + 1) * heads):
        p = (truth(tile, head)[0] - lse[0, head].double()[:, None]).exp()
        dout = tile.dout[0, :, head].double()
        ds = p * (dout @ v.T - (dout * out[0, :, head].double()).sum(-1, keepdim=True)) * tile.scale
        dq.append(ds @ k)
        dk += ds.T @ tile.q[0, :, head].double()
        dv += p.T @ dout
    return torch.stack(dq, 1), dk, dv


def accuracy(job: Job) -> None:
    """Out, lse, and gradients with a merged lse, of each way on each tile, on two key/value heads;
    no draws; times of plans.
    """
    limit = ERRORS[job.sizes.dtype]
    for queries, keys, causal in job.tiles:
        tile = Tile.draw(job, queries, keys, causal)
        groups = (0, job.sizes.g - 1)
        heads = [group * (job.sizes.h // job.sizes.g) for group in groups]
        true = [truth(tile, head)[1:] for head in heads]
        # Another part of the keys, which the merged out and lse also have.
        other = (
            0.1 * torch.randn_like(tile.dout, dtype=torch.float32),
            torch.randn(1, job.sizes.h, queries, device=job.device) + float(np.log(keys)),
        )
        merged, grads = None, []
        for name, forward, backward in paths(job, tile):
            before = job.drawn()
            out, lse = forward()
            where = {"tile": tile.name, "kernel": name}
            job.check(
                "out",
                max(error(out[0, :, h], x) for h, (x, _) in zip(heads, true, strict=True)),
                limit,
                **where,
            )
            off = max(
                float((lse[0, h] - x).abs().max()) for h, (_, x) in zip(heads, true, strict=True)
            )
            job.check("lse", off, LSE_ERROR, **where)
            if merged is None:  # the same for all
                total, whole = out.float().contiguous(), lse.float().contiguous()
                merge_(total, whole, *other)
                merged = total.to(out.dtype), whole
                grads = [true_gradients(tile, group, *merged) for group in groups]
            dq, dk, dv = backward(*merged)
            size = job.sizes.h // job.sizes.g
            for part, got in (("dq", dq), ("dk", dk), ("dv", dv)):
                parts = [
                    got[0, :, g * size : (g + 1) * size] if part == "dq" else got[0, :, g]
                    for g in groups
                ]
                index = ("dq", "dk", "dv").index(part)
                errors = [error(x, of[index]) for x, of in zip(parts, grads, strict=True)]
                job.check(f"{part}, merged lse", max(errors), 1.5 * limit, **where)
            # Recomputation may skip attention; hidden dropout must draw the same numbers then.
            job.check(
                "draws from the default generator",
                float(not torch.equal(before, job.drawn())),
                0,
                **where,
            )
    _plan_times(job)


def _plan_times(job: Job) -> None:
    size = job.sizes.tokens
    masks = {
        "causal": lambda n: Mask.causal(n),
        "documents": lambda n: Mask.documents(samples.exponential(n, n // 64, 0)),
    }
    for cp in (8, 64):
        for name, make in masks.items():
            start = time.perf_counter()
            plan = Plan.build(make(cp * size), Layout.zigzag(cp * size, cp))
            built = time.perf_counter()
            plan.rank_plan(cp // 2)
            job.row(
                plan=name,
                cp=cp,
                tokens=cp * size,
                build_s=built - start,
                rank_plan_s=time.perf_counter() - built,
            )


def speeds(job: Job) -> None:
    """Seconds and TFLOP/s of each way on each tile, and of single calls of 8,192 to 65,536 tokens."""
    lengths = (8192, 16384, 32768, 65536) if job.large else (128, 256)
    for queries, keys, causal in (*job.tiles, (lengths[0], lengths[0], True)):
        tile = Tile.draw(job, queries, keys, causal)
        for name, forward, backward in paths(job, tile):
            out, lse = forward()
            times = [_best(work, job) for work in (forward, partial(backward, out, lse))]
            rates = [
                flops / seconds / 1e12
                for flops, seconds in zip((tile.flops(), 2.5 * tile.flops()), times, strict=True)
            ]
            job.row(tile=tile.name, kernel=name, forward_s=times[0], backward_s=times[1],
                    forward_tflops=rates[0], backward_tflops=rates[1])  # fmt: skip
    for tokens in lengths:
        whole = single_call(Mask.causal(tokens), job.sizes, repeats=job.repeats)
        flops = tokens * (tokens + 1) * job.sizes.h * (job.sizes.d + job.sizes.e)
        for found in whole["all"]:
            rates = {
                "forward_tflops": flops / found["forward_s"] / 1e12,
                "both_tflops": 3.5 * flops / found["both_s"] / 1e12,
            }
            job.row(single_call=tokens, **found, **rates)


def _best(work: Callable[[], Any], job: Job) -> float:
    """The least seconds of several runs, after two that do not count."""
    return min([_seconds(work, job.device) for _ in range(job.repeats + 2)][2:])


def packed_and_dense(job: Job) -> None:
    """One tile by TransformerEngine packed (thd) and dense: the same results; times; deterministic,
    and its workspace.
    """
    limit = ERRORS[job.sizes.dtype]
    kernel = next((x for x in job.kernels() if x.name == "transformer_engine"), None)
    if kernel is None:
        job.fail("TransformerEngine does not run here")
        return
    for queries, keys, causal in job.tiles[::2]:
        tile = Tile.draw(job, queries, keys, causal)
        ways = {
            "dense": (tile.forward, tile.backward),
            "thd": (tile.forward_packed, tile.backward_packed),
        }
        results = {}
        for way, (forward, backward) in ways.items():
            out, lse = forward(kernel)
            results[way] = out, *backward(kernel, out, lse)
            times = [
                _best(work, job)
                for work in (partial(forward, kernel), partial(backward, kernel, out, lse))
            ]
            job.row(
                tile=tile.name,
                way=way,
                forward_s=times[0],
                backward_s=times[1],
                **_deterministic(job, tile, kernel, way),
            )
        off = max(
            error(x, y.double()) for x, y in zip(results["thd"], results["dense"], strict=True)
        )
        job.check("thd against dense", off, limit, tile=tile.name)


def _deterministic(job: Job, tile: Tile, kernel: Any, way: str) -> dict[str, Any]:
    """Peak bytes of a deterministic backward beyond its results, and whether two give the same
    bits; or why there is none.
    """
    with determinism(True):
        reason = kernel.rejection(job.device, job.sizes.dtype, job.sizes.d, job.sizes.e)
        if reason:
            return {"deterministic": reason}
        forward, backward = (
            (tile.forward, tile.backward)
            if way == "dense"
            else (tile.forward_packed, tile.backward_packed)
        )
        out, lse = forward(kernel)
        first = backward(kernel, out, lse)
        before = torch.cuda.memory_allocated() if job.cuda else 0
        if job.cuda:
            torch.cuda.reset_peak_memory_stats()
        second = backward(kernel, out, lse)
        peak = (torch.cuda.max_memory_allocated() if job.cuda else 0) - before
    same = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    job.check("deterministic gradients differ", float(not same), 0, tile=tile.name, way=way)
    return {"deterministic": True, "workspace_bytes": peak - sum(x.nbytes for x in second)}
