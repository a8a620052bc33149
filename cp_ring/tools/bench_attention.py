"""`cp-ring bench attention`: times ring attention beside one kernel call on one rank, and beside
other packages.

Every contestant attends to the same tokens, forward and backward. A rank has one thread of the CPU,
or a GPU of its own. Each round calls every contestant once. So a slow minute of a shared machine
slows all contestants alike.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from cp_ring import Layout, ring_attention
from cp_ring.errors import ConfigError

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's q, k, v, each [1, tokens, heads, head_dim]."""


@dataclass(frozen=True)
class Contest:
    """Sizes of the attention, which is causal with batch size 1, and who takes part.

    `n` tokens on `cp` ranks; `heads` heads of queries, of keys and of values, of size `head_dim`;
    `device` is cpu, with float32, or cuda, with bfloat16; `names` are keys
    of `CONTESTANTS`.
    """

    n: int
    cp: int
    heads: int
    head_dim: int
    device: str
    names: tuple[str, ...]
    repeats: int


def cp_ring(contest: Contest, group: Any) -> Attend:
    """This package; with one rank it is one kernel call on the whole sequence."""
    return partial(ring_attention, group=group, causal=True)


def ring_attention_pytorch(contest: Contest, group: Any) -> Attend:
    """lucidrains' ring-attention-pytorch: its default bucket size."""
    from ring_attention_pytorch import ring_flash_attn

    options = {"causal": True, "ring_reduce_col": True, "ring_size": contest.cp}
    return partial(ring_flash_attn, **options)


def transformer_engine(contest: Contest, group: Any) -> Attend:
    """TransformerEngine's own context parallelism, which stock Megatron uses: type p2p."""
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


@dataclass(frozen=True)
class Contestant:
    """An implementation to time.

    make: returns its attention, on a rank. module: must be installed. devices: where it runs.
    split: the layout of its inputs. alone: it runs on rank 0 alone, which holds all tokens.
    """

    make: Callable[[Contest, Any], Attend]
    module: str = "torch"
    devices: tuple[str, ...] = tuple(DTYPES)
    split: Callable[[int, int], Layout] = Layout.zigzag
    alone: bool = False

    def layout(self, contest: Contest) -> Layout:
        """Which rank holds which tokens."""
        return self.split(contest.n, 1 if self.alone else contest.cp)


CONTESTANTS = {
    "cp_ring": Contestant(cp_ring),
    "one_call": Contestant(cp_ring, alone=True),
    "ring_attention_pytorch": Contestant(
        ring_attention_pytorch, "ring_attention_pytorch", ("cpu",), Layout.contiguous
    ),
    "transformer_engine": Contestant(transformer_engine, "transformer_engine", ("cuda",)),
}


def installed(device: str) -> list[str]:
    """The contestants that run here."""
    return [
        name
        for name, each in CONTESTANTS.items()
        if device in each.devices and importlib.util.find_spec(each.module)
    ]


def run(contest: Contest) -> list[dict[str, Any]]:
    """Results {name, median_s, min_s, max_s, error}: seconds of one forward and backward on the
    slowest rank.

    `error` compares out with the out of one kernel call: norm of the difference divided by norm.
    Raises `ConfigError` where a contestant fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_run_rank, (contest, folder), contest.cp)
        except mp.ProcessRaisedException as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"--only leaves out what fails: {reason}") from None
        results: list[dict[str, Any]] = json.loads(Path(folder, "results").read_text())
    return results


def _run_rank(rank: int, contest: Contest, folder: str) -> None:
    """On a rank: runs all contestants in turn. Rank 0 writes the results."""
    cuda = contest.device == "cuda"
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=contest.cp
    )
    alone = dist.new_group([0])
    groups = {name: alone if one.alone else dist.group.WORLD for name, one in CONTESTANTS.items()}
    rounds = {name: _round(contest, name, rank, groups[name]) for name in contest.names}
    truth = None if rank else _round(contest, "one_call", rank, alone)().double()
    errors = {name: _error(contest, name, work(), truth) for name, work in rounds.items()}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(contest.repeats):
        for name, work in rounds.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor(time.perf_counter() - start, device=contest.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    if not rank:
        results = [
            {
                "name": name,
                "median_s": median(each),
                "min_s": min(each),
                "max_s": max(each),
                "error": errors[name],
            }
            for name, each in times.items()
        ]
        Path(folder, "results").write_text(json.dumps(results))
    dist.destroy_process_group()


def _round(contest: Contest, name: str, rank: int, group: Any) -> Callable[[], Tensor]:
    """One forward and backward, which returns this rank's out [1, tokens, heads, head_dim]; nothing
    on the ranks that a contestant leaves out.
    """
    contestant, layout = CONTESTANTS[name], CONTESTANTS[name].layout(contest)
    if rank >= layout.cp:
        return lambda: torch.zeros(0, device=contest.device)
    generator = torch.Generator().manual_seed(0)
    shape = (1, contest.n, contest.heads, contest.head_dim)
    *inputs, dout = (
        layout.shard(torch.randn(shape, generator=generator), rank, 1)
        .to(contest.device, getattr(torch, DTYPES[contest.device]))
        .contiguous()
        for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in inputs]
    attend = contestant.make(contest, group)

    def one_round() -> Tensor:
        out = attend(*inputs)
        torch.autograd.grad(out, inputs, dout)
        return out.detach()

    return one_round


def _error(contest: Contest, name: str, out: Tensor, truth: Tensor | None) -> float:
    """The error of the out of all ranks, on rank 0, where the truth is."""
    layout = CONTESTANTS[name].layout(contest)
    parts = [out]
    if layout.cp > 1:
        parts = [torch.empty_like(out) for _ in range(layout.cp)]
        dist.all_gather(parts, out.contiguous())
    if truth is None:
        return 0.0
    return float((layout.unshard(parts, 1).double() - truth).norm() / truth.norm())
