"""Contestants of `cp-ring bench attention --device cuda`: context parallelism of other packages,
where they are installed.

All three use the zigzag layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_ring.plan import Layout
from cp_ring.tools.bench.contest import Contest, Round, forward_and_backward


def ring_flash_attn_zigzag(contest: Contest, group: Any) -> tuple[Round, Layout]:
    """zhuzilin's ring-flash-attn, zigzag variant."""
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
