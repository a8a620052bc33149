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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import choose, merge_
from cp_ring.plan.tiles import OPEN
from cp_ring.testing.rank_pool import RankError, Ranks
from cp_ring.tools.job.speeds import PREPARED, in_turn

Round = Callable[[], Tensor]
"""One forward and backward; returns this rank's out [b, tokens, h, d]."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contest:
    """Sizes of the attention, which is causal with batch size 1.

    `n` tokens on `cp` ranks; `heads` heads of queries, of keys and of values, of size `head_dim`;
    `device` is cpu or cuda.
    """

    n: int
    cp: int
    heads: int
    head_dim: int
    dtype: str = "float32"
    device: str = "cpu"

    def draw(self) -> list[Tensor]:
        """q, k, v, dout of the whole sequence, [1, n, heads, head_dim], the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.n, self.heads, self.head_dim)
        return [
            torch.randn(shape, generator=generator).to(self.device, getattr(torch, self.dtype))
            for _ in range(4)
        ]

    def round(self, layout: Layout, group: Any, attend: Attend) -> Round:
        """A round of `attend`, forward and backward, on this rank's part of the layout."""
        rank = 0 if layout.cp == 1 else group.rank()
        q, k, v, dout = (layout.shard(x, rank, 1) for x in self.draw())
        inputs = [x.contiguous().requires_grad_() for x in (q, k, v)]

        def one_round() -> Tensor:
            out = attend(*inputs)
            torch.autograd.grad(out, inputs, dout)
            return out.detach()

        return one_round

    def round_of(self, plan: Plan, group: Any) -> Round:
        """A round of cp_ring with this plan."""
        return self.round(
            plan.layout, group, lambda q, k, v: ring_attention(q, k, v, group, plan=plan)
        )


def cp_ring(contest: Contest, layout: Layout, group: Any) -> Round:
    """This package, by the direct route; on one rank one kernel call on the whole sequence."""
    plan = Plan.build(Mask.causal(contest.n), layout)
    return contest.round_of(plan, group if layout.cp > 1 else None)


def same_tiles(contest: Contest, layout: Layout, group: Any) -> Round:
    """One rank computes the tiles and merges of all ranks: with linear scaling, `cp` ranks take 1 /
    cp of this time.
    """
    plan = Plan.build(Mask.causal(contest.n), Layout.zigzag(contest.n, contest.cp), schedule="ring")
    shards = [[plan.layout.shard(x, rank, 1) for x in contest.draw()] for rank in range(contest.cp)]
    dtype, d = getattr(torch, contest.dtype), contest.head_dim
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
            part = kernel.forward(q[:, tokens], k, v, lo=-OPEN, hi=hi, scale=d**-0.5)
            merge_(out[:, tokens], lse[..., tokens], *part)
        for tokens, (k, v), hi in calls:
            tile = (dout[:, tokens], q[:, tokens], k, v, out[:, tokens], lse[..., tokens])
            grads = kernel.backward(*tile, lo=-OPEN, hi=hi, scale=d**-0.5)
            dq[:, tokens] += grads[0]
            dk[:, : k.shape[1]] += grads[1]
            dv[:, : k.shape[1]] += grads[2]
        return out

    return lambda: plan.layout.unshard([one(rank) for rank in range(contest.cp)], 1)


def ring_attention_pytorch(contest: Contest, layout: Layout, group: Any) -> Round:
    """lucidrains' ring-attention-pytorch: its default bucket size."""
    from ring_attention_pytorch import ring_flash_attn

    options = {"causal": True, "ring_reduce_col": True, "ring_size": contest.cp}
    return contest.round(layout, group, partial(ring_flash_attn, **options))


def jax_ringattention(contest: Contest, layout: Layout, group: Any) -> Round:
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

    return lambda: torch.from_numpy(np.array(jax.block_until_ready(both(*placed))[0]))


def ring_flash_attn_zigzag(contest: Contest, layout: Layout, group: Any) -> Round:
    """zhuzilin's ring-flash-attn."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    attend = partial(zigzag_ring_flash_attn_func, causal=True, group=group)
    return contest.round(layout, group, attend)


def transformer_engine_p2p(contest: Contest, layout: Layout, group: Any) -> Round:
    """TransformerEngine's own context parallelism, communication type p2p."""
    from transformer_engine.pytorch import DotProductAttention

    sizes = contest.heads, contest.head_dim
    core = DotProductAttention(
        *sizes, attn_mask_type="causal", qkv_format="bshd", attention_dropout=0.0
    )
    core.set_context_parallel_group(
        group, dist.get_process_group_ranks(group), torch.cuda.Stream(), cp_comm_type="p2p"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = core(q, k, v, attn_mask_type="causal")
        return out.unflatten(-1, sizes) if out.dim() == 3 else out

    return contest.round(layout, group, attend)


def torch_context_parallel(contest: Contest, layout: Layout, group: Any) -> Round:
    """PyTorch's experimental context_parallel around its scaled dot product attention."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh.from_group(group, "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    plain = contest.round(layout, group, attend)

    def one_round() -> Tensor:
        # context_parallel needs a buffer to shard. The inputs are shards already, so it gets one
        # that nobody reads.
        buffer = torch.zeros(2 * contest.cp, device="cuda")
        with context_parallel(
            mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
        ):
            return plain()

    return one_round


@dataclass(frozen=True)
class Contestant:
    """An implementation to time.

    Attributes:
        make: returns the function to time, for a layout of its inputs and output.
        module: must be installed.
        ring: runs on `cp` ranks; otherwise in one process of its own.
        devices: where it runs.
        split: makes the layout, for tokens and ranks.
    """

    make: Callable[[Contest, Layout, Any], Round]
    module: str = "torch"
    ring: bool = True
    devices: tuple[str, ...] = ("cpu",)
    split: Callable[[int, int], Layout] = Layout.zigzag

    def ranks(self, contest: Contest) -> int:
        """Its ranks."""
        return contest.cp if self.ring else 1

    def layout(self, contest: Contest) -> Layout:
        """The layout on its ranks."""
        return self.split(contest.n, self.ranks(contest))


_CUDA, _BOTH = ("cuda",), ("cpu", "cuda")
CONTESTANTS = {
    "cp_ring": Contestant(cp_ring, devices=_BOTH),
    "cp_ring_one_rank_same_tiles": Contestant(same_tiles, ring=False, split=Layout.contiguous),
    "cp_ring_one_rank_one_call": Contestant(cp_ring, ring=False, devices=_BOTH),
    "ring_attention_pytorch": Contestant(
        ring_attention_pytorch, "ring_attention_pytorch", split=Layout.contiguous
    ),
    "jax_ringattention": Contestant(
        jax_ringattention, "ringattention", ring=False, split=Layout.contiguous
    ),
    "ring_flash_attn_zigzag": Contestant(ring_flash_attn_zigzag, "ring_flash_attn", devices=_CUDA),
    "transformer_engine_p2p": Contestant(
        transformer_engine_p2p, "transformer_engine", devices=_CUDA
    ),
    "torch_context_parallel": Contestant(torch_context_parallel, devices=_CUDA),
}


def prepare_contestant(group: Any, name: str, contest: Contest) -> Tensor:
    """On a rank: makes a contestant and runs one round; returns this rank's part of out."""
    contestant = CONTESTANTS[name]
    PREPARED[name] = contestant.make(contest, contestant.layout(contest), group)
    out: Tensor = PREPARED[name]()
    return out.cpu()


def run(contest: Contest, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Results {name, median_s, min_s, max_s, error, times}: seconds of one forward and backward on
    the slowest rank.

    `error` compares out with the out of one kernel call: norm of the difference divided by norm. A
    contestant that is not installed, or fails, has the reason in `skipped` instead of times.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}[contest.device]
    # Each contestant has processes of its own, so that a failure ends no other contestant.
    pools: dict[str, tuple[Any, int, str]] = {}
    for name in names:
        size = CONTESTANTS[name].ranks(contest)
        pools[name] = Ranks(size, backend=backend), size, name
    truth = cp_ring(contest, Layout.zigzag(contest.n, 1), None)().cpu().double()
    results: dict[str, dict[str, Any]] = {}
    for name, (ranks, size, _) in pools.items():
        result, contestant = results.setdefault(name, {"name": name}), CONTESTANTS[name]
        if importlib.util.find_spec(contestant.module) is None:
            result["skipped"] = f"{contestant.module} is not installed"
            continue
        try:
            parts = ranks.run(prepare_contestant, size, name, contest)
        except RankError as error:
            if name == "cp_ring":
                raise
            result["skipped"] = f"failed: {str(error).splitlines()[-1]}"
            continue
        out = contestant.layout(contest).unshard(parts, 1)
        result["error"] = float((out.double() - truth).norm() / truth.norm())
    running = {name: pools[name] for name in names if "skipped" not in results[name]}
    for name, times in in_turn(running, repeats).items():
        results[name] |= times
    for ranks, _, _ in pools.values():
        ranks.close()
    return list(results.values())
