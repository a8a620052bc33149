"""`cp-ring bench attention`: ring attention against one kernel call, its own work on one rank, and peers, in one run.

Every contestant attends to the same tokens, forward and backward, on the CPU with one thread a rank, or on a GPU a rank.
The rounds go round: one call of each contestant, then the next round, so that a slow minute of a shared machine hits all
alike.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring import Layout, Mask, RingPlan, ring_attention
from cp_ring.bench import cuda_peers
from cp_ring.bench.contest import Contest, Round, differentiated
from cp_ring.kernels import choose, merge_
from cp_ring.plan.tiles import OPEN
from cp_ring.testing.rank_pool import RankError, Ranks


def cp_ring(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """This package: zigzag, direct route."""
    layout = Layout.zigzag(contest.n, contest.cp)
    plan = RingPlan.build(Mask.causal(contest.n), layout)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    return differentiated(lambda q, k, v: ring_attention(q, k, v, group, plan=plan), parts), layout


def one_call(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """One causal kernel call on the whole sequence by one rank: the plan of cp 1."""
    layout = Layout.zigzag(contest.n, 1)
    plan = RingPlan.build(Mask.causal(contest.n), layout)
    return differentiated(lambda q, k, v: ring_attention(q, k, v, plan=plan), contest.draw()), layout


def same_tiles(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """The ring's own tiles and merges, of all ranks, computed by one rank: what linear scaling is measured against."""
    plan = RingPlan.build(Mask.causal(contest.n), Layout.zigzag(contest.n, contest.cp), schedule="ring")
    shards = [[plan.layout.shard(x, rank, 1) for x in contest.draw()] for rank in range(contest.cp)]
    dtype, d = getattr(torch, contest.dtype), contest.head_dim
    kernel = choose("cpu", device=torch.device("cpu"), dtype=dtype, d=d, e=d)

    def one(rank: int) -> Tensor:
        q, _, _, dout = shards[rank]
        out, lse = torch.zeros_like(q), q.new_full((1, contest.heads, q.shape[1]), -math.inf)
        dq, dk, dv = (torch.zeros_like(x) for x in shards[rank][:3])
        calls = [
            (slice(t.q0, t.q1), [shards[hop.sources[0]][i][:, t.k0 : t.k1] for i in (1, 2)], 0 if t.is_causal else OPEN)
            for hop in plan.rank_plan(rank).hops
            for t in hop.tiles
        ]
        for rows, (k, v), hi in calls:
            merge_(out[:, rows], lse[..., rows], *kernel.forward(q[:, rows], k, v, lo=-OPEN, hi=hi, scale=d**-0.5))
        for rows, (k, v), hi in calls:
            tile = (dout[:, rows], q[:, rows], k, v, out[:, rows], lse[..., rows])
            grads = kernel.backward(*tile, lo=-OPEN, hi=hi, scale=d**-0.5)
            dq[:, rows] += grads[0]
            dk[:, : k.shape[1]] += grads[1]
            dv[:, : k.shape[1]] += grads[2]
        return out

    return lambda: plan.layout.unshard([one(rank) for rank in range(contest.cp)], 1), Layout.contiguous(contest.n, 1)


def ring_attention_pytorch(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """lucidrains' ring-attention-pytorch: contiguous shards, its default bucket size."""
    from ring_attention_pytorch import ring_flash_attn

    layout = Layout.contiguous(contest.n, contest.cp)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    return differentiated(
        lambda q, k, v: ring_flash_attn(q, k, v, causal=True, ring_reduce_col=True, ring_size=contest.cp), parts
    ), layout


def jax_ringattention(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """The official JAX ringattention: one process of `cp` host devices, one thread each, contiguous shards."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={contest.cp} --xla_cpu_multi_thread_eigen=false"
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from ringattention.ringattention_jax import ring_attention as attend

    blocks = {"causal_block_size": 1, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "query_chunk_size": 512,
              "key_chunk_size": 512, "dtype": jax.numpy.float32, "policy": jax.checkpoint_policies.nothing_saveable,
              "precision": None, "prevent_cse": True}  # fmt: skip
    mesh, spec = Mesh(np.array(jax.devices()), ("ring",)), PartitionSpec(None, "ring")
    sharded = jax.shard_map(
        lambda q, k, v: attend(q, k, v, None, None, None, "ring", True, blocks),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    placed = [jax.device_put(x.numpy(), NamedSharding(mesh, spec)) for x in contest.draw()]

    @jax.jit
    def both(q, k, v, dout):  # type: ignore[no-untyped-def]
        out, back = jax.vjp(sharded, q, k, v)
        return out, back(dout)

    def one_round() -> Tensor:
        return torch.from_numpy(np.array(jax.block_until_ready(both(*placed))[0]))

    return one_round, Layout.contiguous(contest.n, 1)


@dataclass(frozen=True)
class Contestant:
    """How one is made, what it needs installed, where it runs, and whether on the ring's ranks or in one process of its own."""

    make: Callable[[Contest, Any], tuple[Round, Layout]]
    module: str = "torch"
    ring: bool = True
    devices: tuple[str, ...] = ("cpu",)


CONTESTANTS = {
    "cp_ring": Contestant(cp_ring, devices=("cpu", "cuda")),
    "cp_ring_one_rank_same_tiles": Contestant(same_tiles, ring=False),
    "cp_ring_one_rank_one_call": Contestant(one_call, ring=False, devices=("cpu", "cuda")),
    "ring_attention_pytorch": Contestant(ring_attention_pytorch, "ring_attention_pytorch"),
    "jax_ringattention": Contestant(jax_ringattention, "ringattention", ring=False),
    "ring_flash_attn_zigzag": Contestant(cuda_peers.ring_flash_attn_zigzag, "ring_flash_attn", devices=("cuda",)),
    "transformer_engine_p2p": Contestant(cuda_peers.transformer_engine_p2p, "transformer_engine", devices=("cuda",)),
    "torch_context_parallel": Contestant(cuda_peers.torch_context_parallel, devices=("cuda",)),
}

_prepared: dict[str, Round] = {}


def _prepare(group: Any, name: str, contest: Contest) -> tuple[Tensor, Layout]:
    """On a rank: makes a contestant and runs it once; its part of out, and the layout of the parts."""
    one_round, layout = CONTESTANTS[name].make(contest, group)
    _prepared[name] = one_round
    return one_round().cpu(), layout


def _timed(group: Any, name: str) -> float:
    if group is not None:
        dist.barrier(group)
    start = time.perf_counter()
    if _prepared[name]().is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run(contest: Contest, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Rows {name, median_s, min_s, max_s, error, times}: seconds of one forward and backward, the slowest rank's.

    `error` is the norm of the difference of out to one kernel call, over its norm. A peer that is not installed, or does
    not run, has a `skipped` in place of times.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}[contest.device]
    # Each contestant has processes of its own, so that one that fails takes no other along.
    pools = {name: Ranks(contest.cp if CONTESTANTS[name].ring else 1, backend=backend) for name in names}
    sizes = {name: contest.cp if CONTESTANTS[name].ring else 1 for name in names}
    truth = one_call(contest, None)[0]().cpu()
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[name] = {"name": name}
        if importlib.util.find_spec(CONTESTANTS[name].module) is None:
            rows[name]["skipped"] = f"{CONTESTANTS[name].module} is not installed"
            continue
        try:
            parts = pools[name].run(_prepare, sizes[name], name, contest, timeout=600)
        except RankError as error:
            if name == "cp_ring":
                raise
            rows[name]["skipped"] = f"failed: {str(error).splitlines()[-1]}"
            continue
        out = parts[0][1].unshard([part for part, _ in parts], 1)
        rows[name] |= {"error": float((out.double() - truth.double()).norm() / truth.double().norm()), "times": []}
    for _ in range(repeats):
        for name, row in rows.items():
            if "skipped" not in row:
                row["times"].append(max(pools[name].run(_timed, sizes[name], name, timeout=600)))
    for pool in pools.values():
        pool.close()
    for row in rows.values():
        if "skipped" not in row:
            row |= {"median_s": statistics.median(row["times"]), "min_s": min(row["times"]), "max_s": max(row["times"])}
    return list(rows.values())
