"""Generation at any context-parallel size: the prompt is split over the ranks, its keys stay on the
rank that computed them, and each further token is computed by all ranks.

A token's query attends to the keys of each rank there, and one all-gather of out and lse merges the
partial results, as in Shyam et al., "Tree Attention", 2024 (arXiv 2408.04093). Its own keys go to
one rank, in turn.

Shapes: m keys of this rank, b batch rows, h query and g key/value heads, d and e head sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from cp_ring.megatron.batches import split_batch
from cp_ring.megatron.compat import unwrapped
from cp_ring.megatron.flags.layer_pattern import is_recurrent
from cp_ring.megatron.flags.rule import Job, check_rules
from cp_ring.megatron.flags.rules import GENERATION
from cp_ring.megatron.layers.rotary import positions_in_force
from cp_ring.megatron.ring_core_attention import RingDotProductAttention
from cp_ring.megatron.wrapping import replaced
from cp_ring.ops.dtypes import sum_dtype


@dataclass
class KeyCache:
    """Keys [m, b, g, d] and values of the tokens that this rank holds, for each layer.

    places: positions of this rank's tokens of the prompt, int64 [s]; those from `prompt` on are
    padding. position: that of the token that is computed; None for the prompt.
    """

    places: Tensor
    prompt: int
    position: int | None = None
    held: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def keep(self, layer: Any, key: Tensor, value: Tensor) -> None:
        """Keeps the keys of the prompt [s, b, g, d]."""
        real = (self.places < self.prompt).to(key.device)
        self.held[layer] = self.places.to(key.device)[real], key[real], value[real]

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention [1, b, h * e] of the query [1, b, h, d] of one token, whose key and value [1,
        b, g, d] are added.
        """
        t, group = self.position, layer.cp_group
        assert t is not None, "a prompt is not attended from the cache"
        mine = torch.tensor([t], device=key.device), key, value
        if layer not in self.held:
            self.held[layer] = tuple(x[:0] for x in mine)  # type: ignore[assignment]
        if t % group.size() == group.rank():
            pairs = zip(self.held[layer], mine, strict=True)
            self.held[layer] = tuple(map(torch.cat, pairs))  # type: ignore[assignment]
        places, keys, values = self.held[layer]
        if layer.window[0] >= 0:
            seen = places >= t - layer.window[0]
            keys, values = keys[seen], values[seen]
        exact = sum_dtype(query.dtype)
        q = query[0].to(exact).unflatten(1, (key.shape[2], -1)) * layer.softmax_scale
        scores = torch.einsum("bgrd,mbgd->bgrm", q, keys.to(exact))
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.einsum("bgrm,mbge->bgre", (scores - lse).exp(), values.to(exact))
        part = torch.cat([out, lse], -1)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        if group.size() > 1:
            dist.all_gather(parts, part, group=group)
        outs, lses = torch.stack(parts if group.size() > 1 else [part]).split(
            [out.shape[-1], 1], -1
        )
        if layer.softmax_offset is not None:  # another term of each denominator
            sink = layer.softmax_offset.to(exact).view(1, 1, *q.shape[1:3], 1)
            lses = torch.cat([lses, sink.expand(1, *lses.shape[1:])])
        weights = lses.softmax(0)[: len(outs)]
        return (weights * outs).sum(0).to(query.dtype).flatten(1)[None]


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest token [b] by logits [b, vocabulary]."""
    return logits.argmax(-1)


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    count: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
    end: int | None = None,
) -> Tensor:
    """`tokens` [b, n] with `count` further tokens: [b, n + count], on all ranks the same.

    Args:
        model: a GPT or hybrid model with ring attention and without recurrent layers, in any
            wrappers. Afterwards it is as before.
        tokens: the prompts, which have one length, whole on every rank.
        choose: the next token of each batch row [b], from logits [b, vocabulary]; what the first
            rank chooses counts.
        end: generation ends early where every batch row has this token behind its prompt.

    Raises:
        ConfigError: for models that this cannot run.
    """
    n, language = tokens.shape[1] - 1, _language(model)
    groups = [language.pg_collection.cp, language.pg_collection.tp]
    with _generating(model, language) as cache:
        if n:
            unit = 2 * groups[0].size()
            whole = torch.nn.functional.pad(tokens[:, :n], (0, -n % unit))
            places = torch.arange(whole.shape[1], device=tokens.device).expand_as(whole)
            mine = split_batch({"tokens": whole, "position_ids": places}, groups[0])
            cache.places, cache.prompt = mine["position_ids"][0], n
            with replaced((language, "post_process", False)):  # no logits of the prompt
                model(
                    mine["tokens"], mine["position_ids"], None,
                    packed_seq_params=mine["packed_seq_params"],
                )  # fmt: skip
        for cache.position in range(n, n + count):
            place = torch.full_like(tokens[:, :1], cache.position)
            with positions_in_force((place, place)):  # which `_place` replaces
                logits = model(tokens[:, -1:], place, None, runtime_gather_output=True)
            following = choose(logits[:, -1])[:, None].to(tokens).contiguous()
            for group in groups:
                if group.size() > 1:
                    dist.broadcast(following, group=group, group_src=0)
            tokens = torch.cat([tokens, following], 1)
            if end is not None and bool((tokens[:, n + 1 :] == end).any(1).all()):
                break
    return tokens


def _language(model: Any) -> Any:
    """The model in its wrappers; raises `ConfigError` if it cannot generate."""
    language = unwrapped(model)
    others = [
        type(part).__name__
        for part in language.modules()
        if is_recurrent(part)
        or not isinstance(getattr(part, "core_attention", None), RingDotProductAttention | None)
    ]
    known = {**vars(language.config), "other_layers": ", ".join(sorted({*others}))}
    known["position_embedding_type"] = getattr(language, "position_embedding_type", None)
    check_rules(Job(argparse.Namespace(**known)), GENERATION)
    return language


@contextmanager
def _generating(model: Any, language: Any) -> Iterator[KeyCache]:
    """Within the context the model generates from a cache of keys; afterwards it is as before."""
    cache = KeyCache(torch.empty(0, dtype=torch.int64), 0)

    def place(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a rotary embedding: one position, not split over ranks."""
        return None if cache.position is None else ((1, cache.position, True), {})

    parts = [*model.modules()]
    changes: list[tuple[Any, str, Any]] = [(part, "training", False) for part in parts]
    # without the predictions of further tokens
    changes.append((language.config, "mtp_num_layers", None))
    if hasattr(language, "mtp_process"):
        changes.append((language, "mtp_process", False))
    for part in parts:
        if isinstance(part, RingDotProductAttention):
            largest = part.current_max_attn_logits  # which the next step may clip
            changes += [(part, "cache", cache), (part, "current_max_attn_logits", largest)]
    with ExitStack() as stack:
        stack.enter_context(replaced(*changes))
        for part in parts:
            if isinstance(part, RotaryEmbedding):
                stack.enter_context(part.register_forward_pre_hook(place, with_kwargs=True))
        yield cache
