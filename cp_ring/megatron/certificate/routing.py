"""Routers of experts that look at all tokens of a rank together: limits of capacity, and Sinkhorn's
algorithm.

Megatron defines both by the tokens that one rank holds, so that a model without context
parallelism, whose rank holds more of them, is another model. The twin of the tiny model therefore
asks Megatron's functions once for the tokens of each rank of the job, on whole batch rows. So it
has the experts of the job's tokens, and a token on the wrong rank still shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron.wrapping import replaced


@contextmanager
def routed_by_rank(args: argparse.Namespace, positions: list[Tensor]) -> Iterator[None]:
    """Within the block routers of a model of whole batch rows take tokens as the ranks of the job
    hold them.

    positions: the positions [b, s] of the tokens of each context-parallel rank. With sequence
        parallelism the tensor-parallel ranks share these tokens, and those of the whole batch rows.
    """
    from megatron.core import parallel_state  # heavy, and installed with Megatron only
    from megatron.core.transformer.moe import router

    shares = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    group = parallel_state.get_tensor_model_parallel_group() if shares > 1 else None
    held = [indices for of_rank in positions for indices in _indices(of_rank, shares)]
    sinkhorn, drop = router.sinkhorn, getattr(router, "apply_router_token_dropping", None)

    def sinkhorn_by_rank(cost: Tensor, *rest: Any, **named: Any) -> Tensor:
        return _by_rank(lambda part: sinkhorn(part, *rest, **named), cost, held, group)

    def drop_by_rank(
        probs: Tensor, routing_map: Tensor, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat([probs.detach(), routing_map.to(probs.dtype)], 1)

        def kept(part: Tensor) -> Tensor:
            assert drop is not None, "this Megatron drops no tokens"
            scores, chosen = part.chunk(2, 1)
            return drop(scores, chosen.bool(), *rest, **named)[1].to(part.dtype)

        left = _by_rank(kept, both, held, group).bool()
        return probs * left, left

    changes: list[tuple[Any, str, Any]] = [(router, "sinkhorn", sinkhorn_by_rank)]
    changes += [(router, "apply_router_token_dropping", drop_by_rank)] if drop is not None else []
    with replaced(*changes):
        yield


def _indices(of_rank: Tensor, shares: int) -> list[Tensor]:
    """For each tensor-parallel rank, where its tokens are among those of whole batch rows, which
    Megatron orders [n, b].
    """
    b = len(of_rank)
    places = of_rank.T * b + torch.arange(b)
    return [part.reshape(-1) for part in places.chunk(shares, 0)]


@torch.no_grad()
def _by_rank(
    function: Callable[[Tensor], Tensor], mine: Tensor, held: list[Tensor], group: Any
) -> Tensor:
    """What `function` gives for the tokens of each rank, for the tokens of this one: [tokens, x] to
    [tokens, y].
    """
    whole = mine
    if group is not None:
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        whole = torch.cat(parts)
    results: Tensor | None = None
    for indices in held:
        part = function(whole[indices.to(whole.device)])
        results = whole.new_empty(len(whole), part.shape[1]) if results is None else results
        results[indices.to(whole.device)] = part
    assert results is not None, "no rank has tokens"
    return results if group is None else results.chunk(group.size())[group.rank()]
