"""Language models of Hugging Face transformers under context parallelism: their attention becomes
ring attention, and each rank gets its tokens of a batch.

Shapes: b batch rows of n tokens; h query and g key/value heads of sizes d and e; cp ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cp_ring.api import ring_attention
from cp_ring.comm.same_batch import check_same_batch
from cp_ring.comm.transport import Group, transport_for
from cp_ring.errors import ConfigError
from cp_ring.sharding import parts_of

OFFSETS = "cp_ring_offsets"
"""What `shard_batch` adds to a batch, and the models hand to attention: where the documents of the
whole batch row begin and end, (0, ..., n)."""

_KINDS = {"full_attention", "sliding_attention"}
_IGNORED = -100  # the label of tokens without a loss


def use_ring_attention(model: PreTrainedModel, group: Group = None, **options: Any) -> None:
    """Makes ring attention over the ranks of `group` the attention of all layers of `model`.

    The windows, learned sinks and scales of its layers are kept. The model is then called
    with what `shard_batch` returns. options: those of `cp_ring.ring_attention`, such as `route`,
    `heads`, `kernel` and `wire`.

    Raises `ConfigError` for models with other layers, or whose attention transformers cannot
    replace.
    """
    config, name = model.config, type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "layers with a state"
        raise ConfigError(f"{name} has {what}, which ring attention cannot split over ranks")
    if config.get_text_config() is not config or config.is_encoder_decoder:
        raise ConfigError(f"{name} reads more than one sequence of tokens: give a language model")
    # flash attention, as ring attention, has its mask from the layers and not from a tensor
    if not model._supports_attention_backend or not model._supports_flash_attn:
        raise ConfigError(f"{name} does not let transformers replace its attention")
    implementation = f"cp_ring_{id(model):x}"
    AttentionInterface.register(implementation, partial(_attend, group, options))
    AttentionMaskInterface.register(implementation, _no_mask)
    model.set_attn_implementation(implementation)


def shard_batch(batch: Mapping[str, Any], group: Group = None) -> dict[str, Any]:
    """This rank's tokens of a batch that all ranks of `group` hold, for a model after
    `use_ring_attention`: `model(**shard_batch(batch, group)).loss`.

    batch: `input_ids` [b, n], and where they exist `labels`, `position_ids` and `attention_mask`
    [b, n], as transformers' collators make them. Labels are shifted here, before the split. Where
    positions of a single batch row begin again at 0, its documents do not see one another
    (`DataCollatorWithFlattening`). An attention mask may hide padding at the end. Tokens are added
    at the end, without a loss, until n is a multiple of 2 * cp.

    The loss of a rank is cp times the sum over its tokens, divided by the number of labels of the
    whole batch, or by `num_items_in_batch`. So the average over the ranks, of losses and of
    gradients, is that of the whole batch: DDP or FSDP over the same ranks takes it.

    Raises `ConfigError` for padding before tokens, and for entries of another shape.
    """
    tokens = batch["input_ids"]
    transport = transport_for(group, tokens.device)
    check_same_batch(transport, batch)
    cp, (batch_size, n) = transport.size if transport else 1, tokens.shape
    whole = {
        "input_ids": tokens,
        "position_ids": batch.get("position_ids", torch.arange(n, device=tokens.device)[None]),
    }
    if "labels" in batch:
        whole["labels"] = pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED)
    rest = {name: x for name, x in batch.items() if name not in {*whole, *_OF_THE_ROW}}
    for name, x in (whole | {"attention_mask": batch.get("attention_mask", tokens)}).items():
        if x.shape not in ((batch_size, n), (1, n)):
            raise ConfigError(
                f"{name} is {tuple(x.shape)}: it must be {(batch_size, n)} as input_ids"
            )
    if rest:
        raise ConfigError(f"shard_batch does not know how to split {', '.join(sorted(rest))}")
    _check_padding(batch.get("attention_mask"))
    offsets = _offsets(whole["position_ids"], batch_size)
    counted = batch.get("num_items_in_batch")
    more = -n % (2 * cp) if cp > 1 else 0
    if more:
        fill = {"labels": _IGNORED}
        whole = {name: pad(x, (0, more), value=fill.get(name, 0)) for name, x in whole.items()}
        offsets = (*offsets, n + more) if len(offsets) > 2 else (0, n + more)
    parts = {name: x if cp == 1 else parts_of(x, None, group, 1) for name, x in whole.items()}
    parts["position_ids"] = parts["position_ids"].expand(batch_size, -1)
    parts |= {OFFSETS: offsets, "use_cache": False}
    if "labels" in whole:
        total = (whole["labels"] != _IGNORED).sum() if counted is None else counted
        parts |= {"shift_labels": parts["labels"], "num_items_in_batch": total / cp}
    return parts


_OF_THE_ROW = {
    "attention_mask", "num_items_in_batch", "use_cache", "return_dict",
    # made from the positions
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
}  # fmt: skip


def _check_padding(mask: Tensor | None) -> None:
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError(
            "attention_mask hides tokens before others: pad at the end (padding_side='right')"
        )


def _offsets(positions: Tensor, batch_size: int) -> tuple[int, ...]:
    """Where the documents of the batch row begin, and its end."""
    n = positions.shape[1]
    starts = (positions[:, 1:] != positions[:, :-1] + 1).nonzero()
    if not len(starts):
        return 0, n
    if batch_size > 1:
        raise ConfigError(
            "position_ids of several batch rows begin again: give packed documents as one batch row"
        )
    return 0, *(starts[:, 1] + 1).tolist(), n


def _no_mask(*args: Any, **named: Any) -> None:
    """In place of the mask tensors of a model."""


def _attend(
    group: Group,
    options: dict[str, Any],
    module: nn.Module,
    *tensors: Tensor,
    **named: Any,
) -> tuple[Tensor, None]:
    """As transformers calls attention: query [b, h, n / cp, d], key [b, g, n / cp, d] and value
    [b, g, n / cp, e] give [b, n / cp, h, e].
    """
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])  # a mask, which there is not, comes fourth
    offsets, transport = named.get(OFFSETS), transport_for(group, q.device)
    if offsets is None or offsets[-1] != q.shape[1] * (transport.size if transport else 1):
        raise ConfigError("the model was not called with what shard_batch returns")
    causal = named.get("is_causal")
    if not (module.is_causal if causal is None else causal) or named.get("dropout"):
        raise ConfigError(
            f"{type(module).__name__} has attention dropout, or sees later tokens, which ring "
            "attention of transformers does not support"
        )
    if named.get("softcap"):
        raise ConfigError(
            f"{type(module).__name__} caps its scores (softcap), which ring attention does not"
        )
    window = named.get("sliding_window")
    out = ring_attention(
        q,
        k,
        v,
        group,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, 0),
        cu_seqlens=offsets if len(offsets) > 2 else None,
        softmax_scale=named.get("scaling"),
        sink=named.get("s_aux"),
        **options,
    )
    return out, None
