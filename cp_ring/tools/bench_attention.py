"""`cp-ring bench attention`: times ring attention beside one kernel call on one rank, and beside
other packages.

Every contestant attends to the same tokens, forward and backward. A rank has one thread of the CPU,
or a GPU of its own. Each round calls every contestant once. So a slow minute of a shared machine
slows all contestants alike.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from cp_ring import Layout, ring_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's q, k, v, each [1, tokens, heads, head_dim]."""


@dataclass(frozen=True)
class Contest:
    """Sizes of the attention, which is causal with batch size 1.

    `n` tokens on `cp` ranks; `heads` heads of queries, of keys and of values, of size `head_dim`;
    `device` is cpu, with float32, or cuda, with bfloat16.
    """

    n: int
    cp: int
    heads: int
    head_dim: int
    device: str
    repeats: int


def contestants(contest: Contest) -> dict[str, tuple[Attend, Layout]]:
    """Return what takes part, on a rank: its attention, and which rank holds which tokens."""
    world, alone = dist.group.WORLD, cast(dist.ProcessGroup, dist.new_group([0]))
    zigzag = Layout.zigzag(contest.n, contest.cp)
    found: dict[str, tuple[Attend, Layout]] = {
        "cp_ring": (partial(ring_attention, group=world, causal=True), zigzag),
        "one_call": (
            partial(ring_attention, group=alone, causal=True),
            Layout.contiguous(contest.n, 1),
        ),
    }
    if contest.device == "cpu" and find_spec("ring_attention_pytorch"):
        from ring_attention_pytorch import ring_flash_attn

        options = {"causal": True, "ring_reduce_col": True, "ring_size": contest.cp}
        layout = Layout.contiguous(contest.n, contest.cp)
        found["ring_attention_pytorch"] = partial(ring_flash_attn, **options), layout
    if contest.device == "cuda" and find_spec("transformer_engine"):
        found["transformer_engine"] = _transformer_engine(contest, world), zigzag
    return found


def _transformer_engine(contest: Contest, group: Any) -> Attend:
    """Return TransformerEngine's own context parallelism of type p2p, which stock Megatron uses."""
    from transformer_engine.pytorch import DotProductAttention

    sizes = contest.heads, contest.head_dim
    core = DotProductAttention(
        *sizes, attn_mask_type="causal", qkv_format="bshd", attention_dropout=0.0
    )
    core.set_context_parallel_group(
        group, dist.get_process_group_ranks(group), torch.cuda.Stream(), cp_comm_type="p2p"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(q, k, v, attn_mask_type="causal")
        return out.unflatten(-1, sizes) if out.dim() == 3 else out

    return attend


def run(contest: Contest) -> list[dict[str, Any]]:
    """Results {name, median_s, min_s}: seconds of one forward and backward on the slowest
    rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (contest, folder), contest.cp)
        return json.loads(Path(folder, "results").read_text())


def _run_rank(rank: int, contest: Contest, folder: str) -> None:
    """Run all contestants in turn on a rank. Rank 0 writes the results."""
    cuda = contest.device == "cuda"
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=contest.cp
    )
    rounds = {name: _round(contest, rank, *each) for name, each in contestants(contest).items()}
    for work in rounds.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(contest.repeats):
        for name, work in rounds.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()  # the slowest rank
            times[name].append(time.perf_counter() - start)
    if not rank:
        results = [
            {"name": name, "median_s": median(each), "min_s": min(each)}
            for name, each in times.items()
        ]
        Path(folder, "results").write_text(json.dumps(results))
    dist.destroy_process_group()


def _round(contest: Contest, rank: int, attend: Attend, layout: Layout) -> Callable[[], object]:
    """Run one forward and backward of this rank; do nothing on ranks that the layout leaves out."""
    if rank >= layout.cp:
        return lambda: None
    dtype = torch.bfloat16 if contest.device == "cuda" else torch.float32
    shape = (1, contest.n // layout.cp, contest.heads, contest.head_dim)
    q, k, v, dout = torch.randn(4, *shape, device=contest.device, dtype=dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)
