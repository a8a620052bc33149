"""Tokens in the order of the sequence, and documents, for layers whose state runs along it: Mamba
and gated delta net.

These layers exchange tokens for heads, so that each rank holds whole batch rows of some heads. The
tokens then lie rank after rank. They are put in order, and back, by the layout in force, and the
state begins anew with each document.

Shapes: n tokens of a batch row, b batch rows, cp the context-parallel size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.data.documents import DocumentParams, documents_of
from cp_ring.megatron.data.masks import MicrobatchMask
from cp_ring.megatron.plans import make_layout
from cp_ring.megatron.settings import LayerWindows, current, layer_windows, packed_in_whole_rows
from cp_ring.megatron.wrapping import Function, around
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True)
class TokenOrder:
    """Where the tokens of batch rows [n, b] are, on one device.

    Attributes:
        in_sequence: of each token in the order of the sequence, its place among those of rank after
        rank: int64 [n * b].
        by_rank: the inverse of this permutation.
        documents: the number of each token's document in its batch row: int32 [b, n]; None without
        documents.
        cu_seqlens: where documents begin in the stream of all batch rows, and its end: int32
        [documents + 1]; None without.
    """

    in_sequence: torch.Tensor
    by_rank: torch.Tensor
    documents: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of_places(cls, places: torch.Tensor) -> TokenOrder:
        """places: where in their batch rows the tokens of rank after rank are, int64 [n, b]."""
        column = torch.arange(places.shape[1])
        inverse = places.argsort(dim=0)
        return cls(*((order * places.shape[1] + column).reshape(-1) for order in (inverse, places)))

    def to(self, device: torch.device) -> TokenOrder:
        documents, offsets = (
            None if x is None else x.to(device) for x in (self.documents, self.cu_seqlens)
        )
        return TokenOrder(self.in_sequence.to(device), self.by_rank.to(device), documents, offsets)


_OF_TOKENS = ("x", "q", "k", "v", "g", "beta", "b", "w")
"""Tensors [b, n, ...] that functions of fla take by name."""

_made: WeakKeyDictionary[MicrobatchMask, dict[torch.device, TokenOrder]] = RUNTIME.keep(
    WeakKeyDictionary()
)
_in_force: ContextVar[TokenOrder | None] = ContextVar("cp_ring_token_order", default=None)


def order_of(carried: MicrobatchMask, device: torch.device) -> TokenOrder:
    """The order of the tokens of a microbatch with documents, made once for all layers."""
    found = _made.setdefault(carried, {})
    if device not in found:
        found[device] = _of_documents(carried).to(device)
    return found[device]


def _of_documents(carried: MicrobatchMask) -> TokenOrder:
    total = carried.layout.n
    starts = np.union1d(carried.starts(), np.arange(carried.batch) * (total // carried.batch))
    numbers = (np.searchsorted(starts, np.arange(total), "right") - 1).reshape(carried.batch, -1)
    numbers -= numbers[:, :1]
    order = TokenOrder.of_places(
        torch.cat([carried.places(rank) for rank in range(carried.layout.cp)])
    )
    documents, offsets = (
        torch.from_numpy(x.astype(np.int32)) for x in (numbers, np.append(starts, total))
    )
    return TokenOrder(order.in_sequence, order.by_rank, documents, offsets)


@RUNTIME.cache(maxsize=16)
def _of_layout(
    n: int, batch: int, cp: int, name: str, windows: LayerWindows, device: torch.device
) -> TokenOrder:
    layout = make_layout(name, n, cp)
    places = torch.from_numpy(np.concatenate([layout.positions(rank) for rank in range(cp)]))
    return TokenOrder.of_places(places[:, None].expand(-1, batch)).to(device)


def _order(x: torch.Tensor, cp: int, packed: Any) -> TokenOrder:
    """The order of the tokens of `x` [n, b, ...], of the documents `packed`, of those in force, or
    of the layout.
    """
    n, batch = x.shape[:2]
    if packed is not None:
        return order_of(documents_of(packed, n // cp * batch, cp, packed_in_whole_rows()), x.device)
    return _in_force.get() or _of_layout(n, batch, cp, current().layout, layer_windows(), x.device)


def in_sequence(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """The tokens [n, b, d] of rank after rank, in the order of the sequence. As Megatron's
    `_undo_attention_load_balancing`.
    """
    return _reordered(input_, _order(input_, cp_size, packed_seq_params).in_sequence)


def by_rank(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """The inverse of `in_sequence`. As Megatron's `_redo_attention_load_balancing`."""
    return _reordered(input_, _order(input_, cp_size, packed_seq_params).by_rank)


def _reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *x.shape[2:]).index_select(0, order).view(x.shape)


@around
def mamba_with_documents(
    train: Function, self: Any, zxBCdt: torch.Tensor, packed_seq_params: Any = None
) -> Any:
    """Wraps `MambaMixer._ssm_training`: its kernel then has the number of each token's document, in
    the order of the sequence.
    """
    if packed_seq_params is None:
        return train(self, zxBCdt)
    (n, batch), cp = zxBCdt.shape[:2], self.cp.cp_size
    carried = documents_of(packed_seq_params, n // cp * batch, cp, packed_in_whole_rows())
    params = copy.copy(packed_seq_params)
    params.seq_idx = order_of(carried, zxBCdt.device).documents
    return train(self, zxBCdt, params)


def documents_of_tokens(mixer: Any, packed_seq_params: Any, total_tokens: int) -> torch.Tensor:
    """As `MambaMixer._create_packed_seq_idx` of megatron-core 0.16, which counts documents."""
    numbers: torch.Tensor = packed_seq_params.seq_idx
    return numbers


@contextmanager
def _documents_in_force(packed: Any, device: torch.device) -> Iterator[None]:
    carried = packed.documents if isinstance(packed, DocumentParams) else None
    token = _in_force.set(None if carried is None else order_of(carried, device))
    try:
        yield
    finally:
        _in_force.reset(token)


@around
def gated_delta_net_with_documents(
    forward: Function,
    self: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    packed_seq_params: Any = None,
    **named: Any,
) -> Any:
    """Wraps `GatedDeltaNet.forward`: the documents of a microbatch, in thd or sbhd, are in force
    while it runs.
    """
    if packed_seq_params is None:
        return forward(self, hidden_states, *args, **named)
    if self.config.deterministic_mode:
        raise ConfigError(
            "--deterministic-mode: gated delta net layers then have no kernel that knows "
            "documents: leave it out, or the documents"
        )
    tokens = hidden_states.shape[0] * self.sp_size * hidden_states.shape[1]
    carried = documents_of(packed_seq_params, tokens, self.cp_size, packed_in_whole_rows())
    params = DocumentParams.carry(carried)
    with _documents_in_force(params, hidden_states.device):
        return forward(self, hidden_states, *args, packed_seq_params=params, **named)


@around
def norm_with_documents(
    function: Function, self: Any, core_attn_out: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """Wraps `GatedDeltaNet._gated_norm_and_a2a`, which selective recomputation calls again, outside
    of `forward`.
    """
    packed = named.get("packed_seq_params", args[-1] if args else None)
    with _documents_in_force(packed, core_attn_out.device):
        return function(self, core_attn_out, *args, **named)


@around
def fla_with_documents(
    function: Function, *tensors: torch.Tensor, cu_seqlens: Any = None, **named: Any
) -> Any:
    """Wraps `causal_conv1d`, `chunk_gated_delta_rule` or `chunk_gdn2` of the package fla.

    They take documents as `cu_seqlens` of one batch row: the batch rows [b, n, ...] become one.
    Without documents in force nothing changes.
    """
    order = _in_force.get()
    if order is None or cu_seqlens is not None:
        return function(*tensors, cu_seqlens=cu_seqlens, **named)
    whole = {name: named[name] for name in _OF_TOKENS if name in named}
    batch, n = next(iter((*tensors, *whole.values()))).shape[:2]
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (*tensors, *whole.values())]
    named |= zip(whole, flat[len(tensors) :], strict=True)
    out, *states = function(*flat[: len(tensors)], cu_seqlens=order.cu_seqlens, **named)
    return out.reshape(batch, n, *out.shape[2:]), *states
