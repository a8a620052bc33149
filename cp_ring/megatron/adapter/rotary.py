"""Selects the rotary embeddings of a rank's tokens if the tokens or their positions differ between
microbatches.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.wrapping import arguments_of

Selected = tuple[torch.Tensor, torch.Tensor]
"""Positions of a rank's tokens, and their indices in their batch rows: int64 [n / cp, batch] each.
"""

_selected: contextvars.ContextVar[Selected | None] = contextvars.ContextVar(
    "cp_ring_positions", default=None
)


@contextmanager
def positions_in_force(selected: Selected | None) -> Iterator[None]:
    """Use the rotary embeddings of these tokens within the context; None changes nothing."""
    token = _selected.set(selected or _selected.get())
    try:
        yield
    finally:
        _selected.reset(token)


def selecting(forward: Callable[..., Any], by_place: bool = False) -> Callable[..., Any]:
    """Wrap the forward of a rotary embedding: select the embeddings of this rank's tokens, [n / cp,
    batch, 1, d], from [n, 1 or batch, 1, d].

    by_place: the embeddings belong to the tokens of the batch rows in order, not to the positions
    0, 1, 2, ...
    """

    @functools.wraps(forward)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        selected = _selected.get()
        packed = arguments_of(forward, self, *args, **kwargs).get("packed_seq", False)
        if selected is None or packed:
            return result
        whole, *scale = result if isinstance(result, tuple) else (result,)
        index = selected[by_place].to(whole.device)
        which = torch.arange(index.shape[1], device=whole.device) if whole.shape[1] > 1 else 0
        mine = whole[index, which]
        return (mine, *scale) if isinstance(result, tuple) else mine

    # Megatron clears the cache of the wrapped function in one place
    for name in ("cache_clear", "cache_info"):
        if hasattr(forward, name):
            setattr(select, name, getattr(forward, name))
    return select


def tokens_of(packed: Any, group: Any) -> Selected | None:
    """Return a microbatch's tokens on this rank of `group`, or None if they are the same in every
    microbatch.
    """
    from cp_ring.megatron.adapter.documents import DocumentParams

    ring = in_force()
    if not ring.by_microbatch:
        return None
    if isinstance(packed, DocumentParams) and packed.documents is not None:
        return packed.documents.positions(group.rank()), packed.documents.places(group.rank())
    if _selected.get() is not None:
        return None
    raise ConfigError(
        "--cp-ring-mask-kinds: a microbatch came without its mask; split it with "
        "cp_ring.megatron.batches.split_batch"
        if ring.declared_masks
        else "--cp-ring-layout balanced: a microbatch came without its documents; give "
        "--cp-ring-document-mask"
    )
