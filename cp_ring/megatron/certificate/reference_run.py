"""The reference run of a tiny model, at context parallel size 1: it holds whole batch rows, and
attends by a dense mask in float64.

Its Mamba and gated delta net layers run each document by itself, and each branch of a tree after
those that it continues: then no state can cross into another.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.rotary import positions_in_force
from cp_ring.megatron.certificate.dense_oracle import DenseAttention, MaskRule
from cp_ring.megatron.certificate.layer_kinds import declared_scale, declared_window
from cp_ring.megatron.certificate.tiny_batch import Microbatch
from cp_ring.megatron.certificate.tiny_model import arguments_in_force, one_stage
from cp_ring.megatron.flags.layer_pattern import RECURRENT, is_recurrent, letters_of
from cp_ring.megatron.wrapping import loaded_modules, replaced


def uncovered_states(args: argparse.Namespace, mask: str) -> str:
    """What of recurrent layers the reference run cannot have, in words, or "": a part of a document
    on each tensor-parallel rank.
    """
    shared = getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1
    if shared and mask != "causal" and {*letters_of(args)} & {*RECURRENT}:
        return f"the loss of recurrent layers under {mask} with --sequence-parallel"
    return ""


def follow_rules(model: Any, rules: list[MaskRule]) -> None:
    """Makes the layers of the reference run do what the flags declare: attention by dense masks in
    place of the ring, and recurrent layers document by document.
    """
    from cp_ring.megatron.adapter.attention import RingDotProductAttention  # imports Megatron

    scale = declared_scale(model.config)[0]
    paths = [_paths(rule) for rule in rules]
    several = any(len(of_row) > 1 for of_row in paths)
    for module in model.modules():
        ring = getattr(module, "core_attention", None)
        if isinstance(ring, RingDotProductAttention):
            window = declared_window(model.config, ring.layer_number)
            module.core_attention = DenseAttention(ring, window, scale, rules)
        if several and is_recurrent(module):
            module.forward = functools.partial(_by_document, module.forward, paths)


def _paths(rule: MaskRule) -> list[tuple[Tensor, int]]:
    """Of each document or branch, the tokens that its last one sees, and how many are its own."""
    everything, paths, start = torch.arange(len(rule.part)), [], 0
    padding, last = ~rule.sees(everything, everything), rule.last()
    last[:-1] &= ~(padding[:-1] & padding[1:])  # one run, which sees nothing
    for end in (last.nonzero()[:, 0] + 1).tolist():
        seen = rule.sees(everything[end - 1], everything).nonzero()[:, 0]
        paths.append((seen if len(seen) else everything[start:end], end - start))
        start = end
    return paths


def _by_document(
    forward: Callable[..., Any],
    paths: list[list[tuple[Tensor, int]]],
    hidden: Tensor,
    *args: Any,
    **named: Any,
) -> tuple[Tensor, Any]:
    """As the layer's `forward` for batch rows [n, b, h], without the documents that `named` may
    describe.
    """
    named.pop("packed_seq_params", None)
    bias: Any = None
    columns = []
    for batch_row, of_row in enumerate(paths):
        parts = []
        for path, own in of_row:
            tokens = hidden[path.to(hidden.device), batch_row : batch_row + 1]
            out, bias = forward(tokens, *args, **named)
            parts.append(out[-own:])
        columns.append(torch.cat(parts))
    return torch.cat(columns, 1), bias


@contextmanager
def whole_rows_in_force(
    args: argparse.Namespace, alone: Any, batch: Microbatch, own: bool
) -> Iterator[None]:
    """Megatron's arguments and groups, and cp_ring's settings, of the reference run: batch rows in
    order; multi-token prediction stays within the declared documents.

    Rotary embeddings are those of the declared positions. A script's own step, if not `own`, may
    need the kinds of masks.
    """
    last = batch.last()

    def roll(
        tensor: Tensor | None, shifts: int = -1, dims: int = -1, *rest: Any, **named: Any
    ) -> Any:
        if tensor is None:
            return None, None
        rolled = torch.roll(tensor, -1, -1).masked_fill(
            last.to(tensor.device).view(tensor.shape), 0
        )
        return rolled, rolled.sum()

    rolls = (
        (module, "roll_tensor", roll)
        for module in loaded_modules("megatron.core")
        if "roll_tensor" in vars(module)
    )
    used = settings.current()
    kinds = "" if own else used.mask_kinds
    plain = replace(used, layout="zigzag", document_mask=False, mask_kinds=kinds, loss_chunk=0)
    with (
        arguments_in_force(args, one_stage(alone, whole=True)),
        replaced(*rolls),
        positions_in_force(batch.selected()),
        settings.in_force(plain),
    ):
        yield
