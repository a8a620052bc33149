"""Gives each rank the rotary position embeddings of the tokens that it holds, for layouts other than zigzag and declared masks.

Which tokens a rank holds, or which positions they have, may differ from microbatch to microbatch, while Megatron computes the
embeddings of a length once and keeps them. So a rank then keeps the embeddings of the whole length, and those of the microbatch's
tokens are selected each time that the embeddings are asked for: by the model, or by each layer of multi-latent attention.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.plans import make_layout
from cp_ring.megatron.settings import current, split_by_microbatch
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere

_NAME = "get_pos_emb_on_this_cp_rank"

Selected = tuple[torch.Tensor, torch.Tensor]
"""Positions, and places in their batch rows, of the tokens that a rank holds: int64 [n / cp, batch] each."""

_selected: contextvars.ContextVar[Selected | None] = contextvars.ContextVar("cp_ring_positions", default=None)


@contextmanager
def positions_in_force(selected: Selected | None) -> Iterator[None]:
    """Within the context rotary embeddings are those of these tokens; None leaves what is in force."""
    if selected is None:
        yield
        return
    token = _selected.set(selected)
    try:
        yield
    finally:
        _selected.reset(token)


def positions_by_layout(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """The part of `pos_emb` (the whole sequence along `seq_dim`) for the tokens of this rank of `cp_group`.

    It is all of `pos_emb` where the tokens are known only with the microbatch.
    """
    if split_by_microbatch():
        return pos_emb
    layout = make_layout(current().layout, pos_emb.shape[seq_dim], cp_group.size())
    return layout.shard(pos_emb, cp_group.rank(), seq_dim)


def selecting(forward: Callable[..., Any], by_place: bool = False) -> Callable[..., Any]:
    """Wraps the forward of a rotary embedding: of embeddings [n, 1 or batch, 1, d] it returns the tokens', [n / cp, batch, 1, d].

    `by_place`: the embeddings are those of the batch rows' tokens, in order, and not of the positions 0, 1, 2, ...
    """

    @functools.wraps(forward)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        selected = _selected.get()
        packed = inspect.signature(forward).bind(self, *args, **kwargs).arguments.get("packed_seq", False)
        if selected is None or packed:
            return result
        whole, *scale = result if isinstance(result, tuple) else (result,)
        index = selected[by_place].to(whole.device)
        which = torch.arange(index.shape[1], device=whole.device) if whole.shape[1] > 1 else 0
        mine = whole[index, which]
        return (mine, *scale) if isinstance(result, tuple) else mine

    return select


def tokens_of(packed: Any, group: Any) -> Selected | None:
    """The tokens of a microbatch on this rank of `group`; None where they are the same in every microbatch."""
    from cp_ring.megatron.documents import DocumentParams

    if isinstance(packed, DocumentParams) and packed.documents is not None:
        if not split_by_microbatch():
            return None
        return packed.documents.positions(group.rank()), packed.documents.places(group.rank())
    if not split_by_microbatch() or _selected.get() is not None:
        return None
    flag = "--cp-ring-mask-kinds" if current().kinds else "--cp-ring-layout balanced"
    advice = "split it with cp_ring.megatron.batches.split_batch" if current().kinds else "give --cp-ring-document-mask"
    raise ConfigError(f"{flag}: a microbatch came without its {'mask' if current().kinds else 'documents'}; {advice}")


def _of_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a model that asks for rotary embeddings and has the argument `packed_seq_params`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = signature.bind(self, *args, **kwargs).arguments.get("packed_seq_params")
        with positions_in_force(tokens_of(packed, self.pg_collection.cp)):
            return function(self, *args, **kwargs)

    return with_positions


def _replacements() -> Iterator[Replacement]:
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.models.gpt import GPTModel

    found = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core.models") and module]
    yield from replace_everywhere(found, _NAME, positions_by_layout)
    for owner in (rotary_pos_embedding.RotaryEmbedding, yarn_rotary_pos_embedding.YarnRotaryEmbedding):
        yield owner, "forward", selecting(owner.forward)
    multimodal = getattr(rotary_pos_embedding, "MultimodalRotaryEmbedding", None)
    if multimodal is not None:
        yield multimodal, "forward", selecting(multimodal.forward, by_place=True)
    yield GPTModel, "_preprocess", _of_model(GPTModel._preprocess)
    for module, name in (("hybrid.hybrid_model", "HybridModel"), ("mamba.mamba_model", "MambaModel")):  # the older name
        try:
            model = getattr(importlib.import_module(f"megatron.core.models.{module}"), name)
        except (ImportError, AttributeError):
            continue
        if "forward" in vars(model):
            yield model, "forward", _of_model(model.forward)
            return


PATCH = Patch(
    name="rotary_layout",
    what=f"{_NAME} and rotary embeddings follow --cp-ring-layout and the masks of microbatches",
    why="Megatron's rotary embedding assumes the zigzag split, and positions that are places in the sequence",
    replacements=_replacements,
)
