"""Mamba and gated delta net layers of the twin, which run each document by itself, and each branch
of a tree after those that it continues: then no state can cross into another.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import MaskRule, Spans
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of

_CLASSES = (
    ("mamba_mixer", "MambaMixer"),
    ("gated_delta_net", "GatedDeltaNet"),
    ("gated_delta_net", "GatedDeltaNet2"),
)


def uncovered_states(args: argparse.Namespace, mask: str) -> str:
    """What of recurrent layers this module cannot run, in words, or "": a part of a document on
    each tensor-parallel rank.
    """
    found = [kind for letter, kind in RECURRENT.items() if letter in letters_of(args)]
    shared = getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1
    return (
        f"the loss of {found[0]} layers under {mask} with --sequence-parallel"
        if found and shared and mask != "causal"
        else ""
    )


def run_by_document(model: Any, spans: list[Spans | MaskRule]) -> None:
    """Makes the recurrent layers of `model`, which holds whole batch rows, run document by
    document.
    """
    paths = [_paths(of_row) for of_row in spans]
    if all(len(of_row) == 1 for of_row in paths):
        return
    kinds = tuple(kind for kind in map(_class, _CLASSES) if kind is not None)
    for module in model.modules():
        if isinstance(module, kinds):
            module.forward = functools.partial(_by_document, module.forward, paths)


def _paths(of_row: Spans | MaskRule) -> list[tuple[Tensor, int]]:
    """Of each document or branch, the tokens that its last one sees, and how many are its own."""
    if not isinstance(of_row, MaskRule):
        return [(torch.arange(start, end), end - start) for start, end in of_row]
    everything, found, start = torch.arange(len(of_row.part)), [], 0
    padding, last = ~of_row.sees(everything, everything), of_row.last()
    last[:-1] &= ~(padding[:-1] & padding[1:])  # one run, which sees nothing
    for end in (last.nonzero()[:, 0] + 1).tolist():
        seen = of_row.sees(everything[end - 1], everything).nonzero()[:, 0]
        found.append((seen if len(seen) else everything[start:end], end - start))
        start = end
    return found


def _class(name: tuple[str, str]) -> Any:
    try:
        return getattr(importlib.import_module(f"megatron.core.ssm.{name[0]}"), name[1], None)
    except ImportError:  # before 0.17 there is no gated delta net
        return None


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
