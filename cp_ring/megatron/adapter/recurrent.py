"""Puts tokens in sequence order, and passes documents on, for recurrent layers: Mamba and gated
delta net.

These layers exchange tokens for heads, so that each rank holds whole batch rows of some heads. The
tokens arrive grouped by rank. The layout in force says how to put them in sequence order and back.
The state restarts at each document.

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
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import DocumentParams, documents_of, without_documents
from cp_ring.megatron.adapter.microbatch_mask import MicrobatchMask
from cp_ring.megatron.wrapping import Function, around
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True)
class TokenOrder:
    """The order of the tokens of batch rows [n, b], on one device.

    Attributes:
        in_sequence: for each token in sequence order, its index among the tokens grouped by rank:
            int64 [n * b].
        by_rank: the inverse permutation.
        documents: the number of each token's document in its batch row: int32 [b, n].
        cu_seqlens: the offsets of the documents in the stream of all batch rows: int32
            [documents + 1].
    """

    in_sequence: torch.Tensor
    by_rank: torch.Tensor
    documents: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, carried: MicrobatchMask, device: torch.device) -> TokenOrder:
        n, batch, starts = carried.layout.n, carried.batch, _starts(carried)
        places = torch.cat([carried.places(rank) for rank in range(carried.layout.cp)])  # [n, b]
        columns = torch.arange(batch)
        orders = [
            (order * batch + columns).reshape(-1) for order in (places.argsort(dim=0), places)
        ]
        numbers = (np.searchsorted(starts, np.arange(n), "right") - 1).reshape(batch, -1)
        of_rows = numbers - numbers[:, :1], np.append(starts, n)
        documents = [torch.from_numpy(x.astype(np.int32)) for x in of_rows]
        return cls(*(x.to(device) for x in (*orders, *documents)))


_OF_TOKENS = ("x", "q", "k", "v", "g", "beta", "b", "w")
"""Names of the tensors [b, n, ...] that fla's functions take."""

_made: WeakKeyDictionary[MicrobatchMask, dict[torch.device, TokenOrder]] = RUNTIME.keep(
    WeakKeyDictionary()
)
_in_force: ContextVar[TokenOrder | None] = ContextVar("cp_ring_order", default=None)


def order_of(carried: MicrobatchMask, device: torch.device) -> TokenOrder:
    """Return the token order of a microbatch; all layers share it."""
    orders = _made.setdefault(carried, {})
    if device not in orders:
        orders[device] = TokenOrder.of(carried, device)
    return orders[device]


def _starts(carried: MicrobatchMask) -> np.ndarray:
    """Return the offsets in the stream of all batch rows where the state restarts."""
    n = carried.layout.n
    return np.union1d(carried.starts(), np.arange(carried.batch) * (n // carried.batch))


def _order(x: torch.Tensor, cp: int, packed: Any) -> TokenOrder:
    """Return the two permutations (by rank, in sequence) of the n tokens of `x` [n, b, ...], which
    are those of all ranks: for the documents `packed` if given, else those that the microbatch
    put in force, else those of the configured layout.
    """
    order = _in_force.get()
    if packed is None and order is not None:
        return order
    n, batch = x.shape[:2]
    return order_of(_carried(packed, n, batch, cp), x.device)


def _carried(packed: Any, n: int, batch: int, cp: int) -> MicrobatchMask:
    """Return the documents `packed` of batch rows of `n` tokens; if `packed` is None, each batch
    row is one document.
    """
    if packed is None:
        return without_documents(batch, n, cp, in_force())
    return documents_of(packed, n // cp * batch, cp, in_force())


def in_sequence(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """Put tokens [n, b, d] that are grouped by rank in sequence order. Replaces Megatron's
    `_undo_attention_load_balancing`.
    """
    return _reordered(input_, _order(input_, cp_size, packed_seq_params).in_sequence)


def by_rank(input_: torch.Tensor, cp_size: int, packed_seq_params: Any = None) -> torch.Tensor:
    """Group tokens in sequence order by rank: the inverse of `in_sequence`. Replaces Megatron's
    `_redo_attention_load_balancing`.
    """
    return _reordered(input_, _order(input_, cp_size, packed_seq_params).by_rank)


def _reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *x.shape[2:]).index_select(0, order).view(x.shape)


@around
def mamba_with_documents(
    train: Function, self: Any, zxBCdt: torch.Tensor, packed_seq_params: Any = None
) -> Any:
    """Wrap `MambaMixer._ssm_training` so that its kernel gets each token's document number, in
    sequence order.
    """
    if packed_seq_params is None:
        return train(self, zxBCdt)
    (n, batch), cp = zxBCdt.shape[:2], self.cp.cp_size
    carried = _carried(packed_seq_params, n, batch, cp)
    params = copy.copy(packed_seq_params)
    params.seq_idx = order_of(carried, zxBCdt.device).documents
    return train(self, zxBCdt, params)


@contextmanager
def _in_order(order: TokenOrder | None) -> Iterator[None]:
    token = _in_force.set(order)
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
    """Wrap `GatedDeltaNet.forward` so that the microbatch's documents (thd or sbhd) are in force
    while it runs.
    """
    if packed_seq_params is None:
        return forward(self, hidden_states, *args, **named)
    if self.config.deterministic_mode:
        raise ConfigError(
            "--deterministic-mode: gated delta net layers would ignore documents: leave it out"
        )
    n, batch = hidden_states.shape[:2]
    carried = _carried(packed_seq_params, n * self.sp_size * self.cp_size, batch, self.cp_size)
    with _in_order(order_of(carried, hidden_states.device)):
        params = DocumentParams.carry(carried)
        return forward(self, hidden_states, *args, packed_seq_params=params, **named)


@around
def norm_with_documents(
    function: Function, self: Any, core_attn_out: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """Wrap `GatedDeltaNet._gated_norm_and_a2a`. Selective recomputation calls it again outside of
    `forward`.
    """
    packed = named.get("packed_seq_params", args[-1] if args else None)
    carried = packed.documents if isinstance(packed, DocumentParams) else None
    with _in_order(None if carried is None else order_of(carried, core_attn_out.device)):
        return function(self, core_attn_out, *args, **named)


@around
def fla_with_documents(
    function: Function, *tensors: torch.Tensor, cu_seqlens: Any = None, **named: Any
) -> Any:
    """Wrap fla's `causal_conv1d`, `chunk_gated_delta_rule` or `chunk_gdn2`.

    These functions take documents as `cu_seqlens` of one batch row, so the batch rows [b, n, ...]
    are joined into one. Without documents in force nothing changes.
    """
    order = _in_force.get()
    if order is None or cu_seqlens is not None:
        return function(*tensors, cu_seqlens=cu_seqlens, **named)
    named |= zip(("x",) if len(tensors) == 1 else ("q", "k", "v"), tensors, strict=False)
    whole = {name: named.pop(name) for name in _OF_TOKENS if name in named}
    batch, n = next(iter(whole.values())).shape[:2]
    whole = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in whole.items()}
    out, *states = function(**whole, cu_seqlens=order.cu_seqlens, **named)
    return out.reshape(batch, n, *out.shape[2:]), *states
