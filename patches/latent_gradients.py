"""Makes the gradients of multi-latent attention under tensor parallelism those without it.

Two are wrong in Megatron 0.16 to 0.20:

- All heads share the rotated part of keys, but each tensor-parallel rank computes the gradients of
  its own heads alone. Megatron sums them only where the down projection is TransformerEngine's, not
  fused, and --sequence-parallel is given. Elsewhere the gradients of that part of the projection,
  and of all layers before, lack the other ranks' heads; a projection that all ranks hold drifts
  apart.
- With --qk-layernorm it sums the gradients of every weight named q_layernorm over these ranks, as
  norms of single heads need it. Without --sequence-parallel each rank has the whole gradient of
  this one already, so that the sum is as many times larger.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.wrapping import Function, around
from cp_ring.patches.patch import Patch, Replacement

_METHOD = "_qkv_down_projection"  # of newer versions
_REDUCE = "_allreduce_non_tensor_model_parallel_grads"


class _Summed(torch.autograd.Function):
    """Returns its argument; the gradient of the last `r` columns is summed over the ranks of
    `group`.

    Megatron's own function loses the sum of such columns in versions that add in a contiguous copy
    of them.
    """

    @staticmethod
    def forward(ctx: Any, latent: Tensor, r: int, group: Any) -> Tensor:
        ctx.r, ctx.group = r, group
        return latent.view_as(latent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone()
        rotated = grad[..., -ctx.r :].contiguous()
        torch.distributed.all_reduce(rotated, group=ctx.group)
        grad[..., -ctx.r :] = rotated
        return grad, None, None


def _shared(config: Any, group: Any, latent: Tensor) -> Tensor:
    """The latent and the rotated part [..., c + r] of all tensor-parallel ranks, of [..., c + r] or
    a rank's columns of it.

    Where the sequence is split over these ranks, Megatron sums what it gathers of it itself.
    """
    from megatron.core.tensor_parallel import mappings

    if group.size() == 1:
        return latent
    of_all_tokens = not config.sequence_parallel
    if latent.shape[-1] != config.kv_lora_rank + config.qk_pos_emb_head_dim:
        latent = mappings.gather_from_tensor_model_parallel_region(latent, group=group)
        if not of_all_tokens:
            latent = mappings.scatter_to_sequence_parallel_region(latent, group=group)
    return _Summed.apply(latent, config.qk_pos_emb_head_dim, group) if of_all_tokens else latent


@around
def _down_projection(project: Function, self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    queries, latent = project(self, hidden_states)
    return queries, _shared(self.config, self.pg_collection.tp, latent)


@around
def _with_hook(constructor: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of a version whose layers have no method for the down projection."""
    constructor(self, *args, **kwargs)
    config, group = self.config, self.pg_collection.tp
    self.linear_kv_down_proj.register_forward_hook(
        lambda _, __, out: (_shared(config, group, out[0]), *out[1:])
    )


@around
def _without_norms_of_queries(
    reduce: Function, model: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """The function that sums gradients over tensor-parallel ranks, which then does not take norms
    for those of single heads.
    """
    if getattr(config, "multi_latent_attention", False) and not config.sequence_parallel:
        config = copy.copy(config)
        config.qk_layernorm = False
    reduce(model, config, *args, **kwargs)


def _replacements() -> Iterator[Replacement]:
    from megatron.core.transformer import multi_latent_attention as module

    gradients = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    yield gradients, _REDUCE, _without_norms_of_queries(getattr(gradients, _REDUCE))
    for owner in (vars(module).get(name) for name in ("MLASelfAttention", "FusedMLASelfAttention")):
        if hasattr(owner, _METHOD):
            yield owner, _METHOD, _down_projection(getattr(owner, _METHOD))
    if not hasattr(module.MLASelfAttention, _METHOD):
        yield module.MLASelfAttention, "__init__", _with_hook(module.MLASelfAttention.__init__)


PATCH = Patch(
    what="sums the gradients of the rotated part of keys over tensor-parallel ranks in "
    "multi-latent attention, and not those of its norm of queries",
    why="Megatron's gradients depend on the tensor parallel size, but for TransformerEngine's "
    "layers with --sequence-parallel",
    when="--cp-ring",
    replacements=_replacements,
)
