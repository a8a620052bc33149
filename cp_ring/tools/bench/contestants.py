"""`cp-ring bench attention`: times ring attention beside one kernel call, the same tiles on one
rank, and other packages.

Every contestant attends to the same tokens, forward and backward. A rank has one thread of the CPU,
or a GPU of its own. Each round calls every contestant once. So a slow minute of a shared machine
slows all contestants alike.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import choose, merge_
from cp_ring.plan.tiles import OPEN
from cp_ring.testing.rank_pool import RankError, Ranks
from cp_ring.tools.bench.contest import Contest, Round, forward_and_backward
from cp_ring.tools.job.speeds import PREPARED, in_turn, spread


def cp_ring(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """This package: zigzag, direct route."""
    layout = Layout.zigzag(contest.n, contest.cp)
    plan = Plan.build(Mask.causal(contest.n), layout)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    return forward_and_backward(
        lambda q, k, v: ring_attention(q, k, v, group, plan=plan), parts
    ), layout


def one_call(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """One causal kernel call on the whole sequence by one rank: the plan of cp 1."""
    layout = Layout.zigzag(contest.n, 1)
    plan = Plan.build(Mask.causal(contest.n), layout)
    return forward_and_backward(
        lambda q, k, v: ring_attention(q, k, v, plan=plan), contest.draw()
    ), layout


def same_tiles(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """One rank computes the tiles and merges of all ranks: with linear scaling, `cp` ranks take 1 /
    cp of this time.
    """
    plan = Plan.build(Mask.causal(contest.n), Layout.zigzag(contest.n, contest.cp), schedule="ring")
    shards = [[plan.layout.shard(x, rank, 1) for x in contest.draw()] for rank in range(contest.cp)]
    dtype = getattr(torch, contest.dtype)
    d = contest.head_dim
    kernel = choose("cpu", device=torch.device("cpu"), dtype=dtype, d=d, e=d)

    def one(rank: int) -> Tensor:
        q, _, _, dout = shards[rank]
        out = torch.zeros_like(q)
        lse = q.new_full((1, contest.heads, q.shape[1]), -math.inf)
        dq, dk, dv = (torch.zeros_like(x) for x in shards[rank][:3])
        calls = [
            (
                slice(t.q0, t.q1),
                [shards[hop.sources[0]][i][:, t.k0 : t.k1] for i in (1, 2)],
                0 if t.is_causal else OPEN,
            )
            for hop in plan.rank_plan(rank).hops
            for t in hop.tiles
        ]
        for tokens, (k, v), hi in calls:
            merge_(
                out[:, tokens],
                lse[..., tokens],
                *kernel.forward(q[:, tokens], k, v, lo=-OPEN, hi=hi, scale=d**-0.5),
            )
        for tokens, (k, v), hi in calls:
            tile = (dout[:, tokens], q[:, tokens], k, v, out[:, tokens], lse[..., tokens])
            grads = kernel.backward(*tile, lo=-OPEN, hi=hi, scale=d**-0.5)
            dq[:, tokens] += grads[0]
            dk[:, : k.shape[1]] += grads[1]
            dv[:, : k.shape[1]] += grads[2]
        return out

    return lambda: plan.layout.unshard(
        [one(rank) for rank in range(contest.cp)], 1
    ), Layout.contiguous(contest.n, 1)


def ring_attention_pytorch(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """lucidrains' ring-attention-pytorch: contiguous shards, its default bucket size."""
    from ring_attention_pytorch import ring_flash_attn

    layout = Layout.contiguous(contest.n, contest.cp)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    return forward_and_backward(
        lambda q, k, v: ring_flash_attn(
            q, k, v, causal=True, ring_reduce_col=True, ring_size=contest.cp
        ),
        parts,
    ), layout


def jax_ringattention(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """The official JAX ringattention: one process of `cp` host devices, one thread each, contiguous
    shards.
    """
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={contest.cp} --xla_cpu_multi_thread_eigen=false"
    )
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from ringattention.ringattention_jax import ring_attention as attend

    blocks = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": 512,
        "key_chunk_size": 512,
        "dtype": jax.numpy.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": True,
    }
    mesh = Mesh(np.array(jax.devices()), ("ring",))
    spec = PartitionSpec(None, "ring")
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


def ring_flash_attn_zigzag(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """zhuzilin's ring-flash-attn: the zigzag layout, as the two after it."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    layout = Layout.zigzag(contest.n, contest.cp)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    return forward_and_backward(
        lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group), parts
    ), layout


def transformer_engine_p2p(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """TransformerEngine's own context parallelism, communication type p2p."""
    from transformer_engine.pytorch import DotProductAttention

    layout = Layout.zigzag(contest.n, contest.cp)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]
    core = DotProductAttention(
        contest.heads,
        contest.head_dim,
        attn_mask_type="causal",
        qkv_format="bshd",
        attention_dropout=0.0,
    )
    core.set_context_parallel_group(
        group, dist.get_process_group_ranks(group), torch.cuda.Stream(), cp_comm_type="p2p"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = core(q, k, v, attn_mask_type="causal")
        return out.unflatten(-1, (contest.heads, contest.head_dim)) if out.dim() == 3 else out

    return forward_and_backward(attend, parts), layout


def torch_context_parallel(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """PyTorch's experimental context_parallel around its scaled dot product attention."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh.from_group(group, "cuda")
    layout = Layout.zigzag(contest.n, contest.cp)
    parts = [layout.shard(x, group.rank(), 1) for x in contest.draw()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    plain = forward_and_backward(attend, parts)

    def one_round() -> Tensor:
        # context_parallel needs a buffer to shard. The inputs are shards already, so it gets one
        # that nobody reads.
        buffer = torch.zeros(2 * contest.cp, device="cuda")
        with context_parallel(
            mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
        ):
            return plain()

    return one_round, layout


@dataclass(frozen=True)
class Contestant:
    """An implementation to time.

    Attributes:
        make: returns the function to time and the layout of its output.
        module: must be installed.
        ring: runs on `cp` ranks; otherwise in one process of its own.
        devices: where it runs.
    """

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
    "ring_flash_attn_zigzag": Contestant(
        ring_flash_attn_zigzag, "ring_flash_attn", devices=("cuda",)
    ),
    "transformer_engine_p2p": Contestant(
        transformer_engine_p2p, "transformer_engine", devices=("cuda",)
    ),
    "torch_context_parallel": Contestant(torch_context_parallel, devices=("cuda",)),
}


def prepare_contestant(group: Any, name: str, contest: Contest) -> tuple[Tensor, Layout]:
    """On a rank: makes a contestant and runs one round; returns this rank's part of out, and the
    layout of the parts.
    """
    one_round, layout = CONTESTANTS[name].make(contest, group)
    PREPARED[name] = one_round
    return one_round().cpu(), layout


def run(contest: Contest, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Results {name, median_s, min_s, max_s, error, times}: seconds of one forward and backward on
    the slowest rank.

    `error` compares out with the out of one kernel call: norm of the difference divided by norm. A
    contestant that is not installed, or fails, has the reason in `skipped` instead of times.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}[contest.device]
    # Each contestant has processes of its own, so that a failure ends no other contestant.
    pools = {
        name: Ranks(contest.cp if CONTESTANTS[name].ring else 1, backend=backend) for name in names
    }
    sizes = {name: contest.cp if CONTESTANTS[name].ring else 1 for name in names}
    truth = one_call(contest, None)[0]().cpu()
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        results[name] = {"name": name}
        if importlib.util.find_spec(CONTESTANTS[name].module) is None:
            results[name]["skipped"] = f"{CONTESTANTS[name].module} is not installed"
            continue
        try:
            parts = pools[name].run(prepare_contestant, sizes[name], name, contest)
        except RankError as error:
            if name == "cp_ring":
                raise
            results[name]["skipped"] = f"failed: {str(error).splitlines()[-1]}"
            continue
        out = parts[0][1].unshard([part for part, _ in parts], 1)
        results[name]["error"] = float(
            (out.double() - truth.double()).norm() / truth.double().norm()
        )
    running = {
        name: (pools[name], sizes[name], name)
        for name, result in results.items()
        if "skipped" not in result
    }
    for name, times in in_turn(running, repeats).items():
        results[name]["times"] = [clock for clock, _ in times]
        results[name] |= spread(results[name]["times"])
    for pool in pools.values():
        pool.close()
    return list(results.values())
