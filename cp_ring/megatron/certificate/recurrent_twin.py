"""Recurrent layers of the certificate's twin: each document by itself, through the layer's own kernel, with a new state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.oracle import Rule, Spans

_RECURRENT = ("MambaMixer", "GatedDeltaNet")


def recur_alone(twin: Any, spans: Sequence[Spans | Rule], n: int) -> None:
    """Makes each recurrent layer of `twin` run on each document of its batch rows of `n` tokens alone."""
    edges = [_edges(of_row, n) for of_row in spans]
    if all(len(of_row) == 2 for of_row in edges):
        return
    for module in twin.modules():
        if type(module).__name__ in _RECURRENT:
            by_document = _with_documents if module.config.sequence_parallel else _one_by_one
            module.forward = functools.partial(by_document, module.forward, edges)


def _edges(spans: Spans | Rule, n: int) -> list[int]:
    """Where documents of a batch row begin, and its end. Padding is a document too."""
    if isinstance(spans, Rule):
        return [0, *(torch.nonzero(spans.part[1:] != spans.part[:-1]).flatten() + 1).tolist(), n]
    return sorted({0, n, *(edge for span in spans for edge in span)})


def _one_by_one(
    forward: Callable[..., Any], edges: list[list[int]], hidden: Tensor, *args: Any, packed_seq_params: Any = None, **named: Any
) -> tuple[Tensor, Any]:
    """hidden [n, b, d] to the layer's output [n, b, d] and bias."""
    batch_rows, bias = [], None
    for batch_row, of_row in enumerate(edges):
        parts = []
        for start, end in itertools.pairwise(of_row):
            out, bias = forward(hidden[start:end, batch_row : batch_row + 1], *args, **named)
            parts.append(out)
        batch_rows.append(torch.cat(parts))
    return torch.cat(batch_rows, 1), bias


def _with_documents(
    forward: Callable[..., Any], edges: list[list[int]], hidden: Tensor, *args: Any, packed_seq_params: Any = None, **named: Any
) -> Any:
    """As `_one_by_one`, by the documents that the kernel knows: with sequence parallelism a rank has not all tokens."""
    from cp_ring.megatron.documents import DocumentParams, Documents  # imports Megatron

    n = edges[0][-1]
    starts = np.array([edge + n * batch_row for batch_row, of_row in enumerate(edges) for edge in of_row[:-1]])
    documents = Documents.in_rows(np.append(starts, n * len(edges)), len(edges), "zigzag", 1)
    return forward(hidden, *args, packed_seq_params=DocumentParams.carry(documents), **named)
