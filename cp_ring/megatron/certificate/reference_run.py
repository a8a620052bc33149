"""The reference run of a tiny model at context parallel size 1, with whole batch rows and a dense
mask in float64.

Its Mamba and gated delta net layers run each document separately, so no state can cross into
another document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.rotary import positions_in_force
from cp_ring.megatron.certificate.dense_oracle import DenseAttention, MaskRule
from cp_ring.megatron.certificate.layer_kinds import declared_scale, declared_window
from cp_ring.megatron.certificate.tiny_model import attention_layers
from cp_ring.megatron.wrapping import loaded_modules, replaced


def follow_rules(model: Any, rules: list[MaskRule]) -> None:
    """Make the layers of the reference run follow the flags: dense masks in place of the ring, and
    recurrent layers document by document.
    """
    scale = declared_scale(model.config)[0]
    paths = [_paths(rule) for rule in rules]
    for layer in attention_layers(model):
        window = declared_window(model.config, layer.core_attention.layer_number)
        layer.core_attention = DenseAttention(layer.core_attention, window, scale, rules)
    for module in model.modules():
        if any(len(of_row) > 1 for of_row in paths) and hasattr(module, "cp_ring_group"):
            module.forward = functools.partial(_by_document, module.forward, paths)


def _paths(rule: MaskRule) -> list[tuple[Tensor, int]]:
    """Return for each document or branch of a batch row the tokens that its last token sees, and
    how many of them are its own, the last ones. Padding, which sees nothing, is a document too.
    """
    every = torch.arange(len(rule.last))
    real = rule.sees(every, every)
    goes_on = ~rule.last[:-1] & (rule.positions.diff() == 1) | ~(real[1:] | real[:-1])
    found = []
    start = 0
    for end in [*((~goes_on).nonzero()[:, 0] + 1).tolist(), len(every)]:
        seen = rule.sees(torch.tensor([[end - 1]]), every[None])[0].nonzero()[:, 0]
        found.append((seen if len(seen) else every[start:end], end - start))
        start = end
    return found


def _by_document(
    forward: Callable[..., Any],
    paths: list[list[tuple[Tensor, int]]],
    hidden: Tensor,
    *args: Any,
    **named: Any,
) -> tuple[Tensor, Any]:
    """Run the layer's `forward` on batch rows [n, b, h], one document or branch at a time behind
    all that comes before it, without the documents that `named` may hold.
    """
    named.pop("packed_seq_params", None)
    columns = []
    bias = None
    for batch_row, of_row in zip(hidden.split(1, 1), paths, strict=True):
        outputs = []
        for path, own in of_row:
            out, bias = forward(batch_row[path], *args, **named)
            outputs.append(out[-own:])
        columns.append(torch.cat(outputs))
    return torch.cat(columns, 1), bias


@contextmanager
def whole_rows_in_force(rules: list[MaskRule], declares: bool) -> Iterator[None]:
    """Put cp_ring's settings of the reference run in force: batch rows in order, and multi-token
    prediction inside the declared documents.

    Rotary embeddings follow declared positions, and those of documents that a layout balances. The
    kinds of masks stay set if the batch `declares` masks, which a step reads.
    """
    last = torch.stack([rule.last for rule in rules])
    places = None
    if in_force().by_microbatch:
        ids = torch.stack([rule.positions for rule in rules], 1)
        places = ids, torch.arange(len(ids))[:, None].expand_as(ids)

    def roll(tensor: Any, *rest: Any, **named: Any) -> Any:
        if tensor is None:
            return None, None
        ends = last.to(tensor.device).view(tensor.shape)
        rolled = tensor.roll(-1, -1).masked_fill(ends, 0)
        return rolled, rolled.sum()

    modules = loaded_modules("megatron.core")
    rolls = ((each, "roll_tensor", roll) for each in modules if "roll_tensor" in vars(each))
    used = settings.current()
    kinds = used.mask_kinds if declares else ""
    plain = replace(used, layout="zigzag", document_mask=False, mask_kinds=kinds, loss_chunk=0)
    with replaced(*rolls), positions_in_force(places), settings.in_force(plain):
        yield
