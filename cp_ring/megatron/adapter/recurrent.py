"""Tokens in the order of the sequence, and documents, for layers whose state runs along it: Mamba
and gated delta net.

These layers exchange tokens for heads, so that each rank holds whole batch rows of some heads. The
tokens then lie rank after rank. They are put in order, and back, by the layout in force, and the
state begins anew with each document. With --cp-ring-recurrent states, a layer is made as without
context parallelism instead, and its kernels pass states from rank to rank (`StatePassing`).

Shapes: n tokens of a batch row, b batch rows, cp the context-parallel size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cp_ring.comm.transport import transport_for
from cp_ring.errors import ConfigError
from cp_ring.megatron.data.documents import ALONE, DocumentParams, documents_of, without_documents
from cp_ring.megatron.data.masks import MicrobatchMask
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.megatron.wrapping import Function, around, replaced
from cp_ring.runtime import RUNTIME

if TYPE_CHECKING:
    from cp_ring.recurrent.states import StatePassing


@dataclass(frozen=True)
class TokenOrder:
    """Where the tokens of batch rows [n, b] are, on one device.

    Attributes:
        in_sequence: of each token in the order of the sequence, its place among those of rank after
        rank: int64 [n * b].
        by_rank: the inverse of this permutation.
        documents: the number of each token's document in its batch row: int32 [b, n].
        cu_seqlens: where documents begin in the stream of all batch rows, and its end: int32
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
"""Tensors [b, n, ...] that functions of fla take by name."""

_made: WeakKeyDictionary[MicrobatchMask, dict[torch.device, TokenOrder]] = RUNTIME.keep(
    WeakKeyDictionary()
)
_in_force: ContextVar[TokenOrder | StatePassing | None] = ContextVar("cp_ring_order", default=None)
_passing: WeakKeyDictionary[MicrobatchMask, dict[Any, StatePassing]] = RUNTIME.keep(
    WeakKeyDictionary()
)
_kinds: WeakKeyDictionary[StatePassing, tuple[Any, ...]] = RUNTIME.keep(WeakKeyDictionary())
_proven: set[tuple[Any, ...]] = RUNTIME.keep(set())


def order_of(carried: MicrobatchMask, device: torch.device) -> TokenOrder:
    """The order of the tokens of a microbatch, made once for all layers."""
    orders = _made.setdefault(carried, {})
    if device not in orders:
        orders[device] = TokenOrder.of(carried, device)
    return orders[device]


def _starts(carried: MicrobatchMask) -> np.ndarray:
    """Where the state begins anew in the stream of all batch rows."""
    n = carried.layout.n
    return np.union1d(carried.starts(), np.arange(carried.batch) * (n // carried.batch))


def passing_of(carried: MicrobatchMask, group: Any, device: torch.device) -> StatePassing:
    """How states pass the ranks of `group` in a microbatch with documents, made once for all
    layers.
    """
    from cp_ring.recurrent.segments import Segments
    from cp_ring.recurrent.states import StatePassing

    passings = _passing.setdefault(carried, {})
    if (group, device) not in passings:
        segments = Segments.build(carried.layout, _starts(carried))
        transport = transport_for(group, device)
        assert transport is not None, "states pass between ranks"
        passing = passings[group, device] = StatePassing(segments, transport, device)
        _kinds[passing] = segments.layout.name, segments.layout.cp, carried.kind()
    return passings[group, device]


def _prove(passing: StatePassing, width: int) -> None:
    """Of the plans of a kind, the first one is proven with each width of a convolution that runs on
    such a plan.
    """
    from cp_ring.recurrent.proof import verify

    if (key := (*_kinds[passing], width)) not in _proven:
        verify(passing.segments, width)
        _proven.add(key)


def _order(x: torch.Tensor, cp: int, packed: Any) -> TokenOrder:
    """The order of the tokens of `x` [n, b, ...], of the documents `packed`, of those in force, or
    of the layout.
    """
    order = _in_force.get()
    if packed is None and isinstance(order, TokenOrder):
        return order
    n, batch = x.shape[:2]
    return order_of(_carried(packed, n, batch, cp), x.device)


def _carried(packed: Any, n: int, batch: int, cp: int) -> MicrobatchMask:
    """The documents `packed` of batch rows of `n` tokens; without any, each is one document."""
    if packed is None:
        return without_documents(batch, n, cp)
    return documents_of(packed, n // cp * batch, cp, packed_in_whole_rows())


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
    the order of the sequence, or the ranks over which states pass.
    """
    if group := getattr(self, "cp_ring_group", None):
        n, batch = zxBCdt.shape[:2]
        with _in_order(_states(packed_seq_params, n, batch, group, zxBCdt.device)):
            return train(self, zxBCdt)
    if packed_seq_params is None:
        return train(self, zxBCdt)
    (n, batch), cp = zxBCdt.shape[:2], self.cp.cp_size
    carried = _carried(packed_seq_params, n, batch, cp)
    params = copy.copy(packed_seq_params)
    params.seq_idx = order_of(carried, zxBCdt.device).documents
    return train(self, zxBCdt, params)


@around
def made_for_states(
    constructor: Function, layer: Any, *args: Any, pg_collection: Any = None, **named: Any
) -> None:
    """Wraps the constructors of recurrent layers: under --cp-ring-recurrent states they have all
    heads of their tensor-parallel rank, and know the ranks over which states pass.
    """
    group = getattr(pg_collection, "cp", None)
    kind = "mamba" if hasattr(type(layer), "_ssm_training") else "gdn"
    if current().recurrent_ways[kind] != "states" or group is None or group.size() == 1:
        return constructor(layer, *args, pg_collection=pg_collection, **named)
    groups = copy.copy(pg_collection)
    groups.cp = ALONE
    constructor(layer, *args, pg_collection=groups, **named)
    layer.cp_ring_group = group


@around
def checked_for_states(check: Function, config: Any) -> None:
    """Wraps `TransformerConfig.__post_init__`, which wants a head of each linear layer for each of
    the context-parallel ranks: states need none.
    """
    if current().recurrent_ways["gdn"] == "heads":
        return check(config)
    names = ("linear_num_key_heads", "linear_num_value_heads")
    heads = {name: getattr(config, name) for name in names if getattr(config, name, None)}
    cp = config.context_parallel_size
    with replaced(*((config, name, count * cp) for name, count in heads.items())):
        check(config)


@contextmanager
def _in_order(order: TokenOrder | StatePassing | None) -> Iterator[None]:
    token = _in_force.set(order)
    try:
        yield
    finally:
        _in_force.reset(token)


def _states(packed: Any, n: int, batch: int, group: Any, device: torch.device) -> StatePassing:
    """How states pass where this rank holds `n` tokens of each batch row."""
    cp = group.size()
    return passing_of(_carried(packed, n * cp, batch, cp), group, device)


@around
def mamba_with_states(function: Function, x: torch.Tensor, *params: Any, **named: Any) -> Any:
    """Wraps `mamba_split_conv1d_scan_combined` of the package mamba_ssm."""
    passing = _in_force.get()
    if passing is None or isinstance(passing, TokenOrder):
        return function(x, *params, **named)
    named.pop("seq_idx", None)
    _prove(passing, params[0].shape[-1])
    out = passing.mamba(function, x.reshape(1, -1, x.shape[2]), *params, **named)
    return out.reshape(*x.shape[:2], -1)


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
    while it runs, and the ranks over which states pass.
    """
    group = getattr(self, "cp_ring_group", None)
    if packed_seq_params is None and group is None:
        return forward(self, hidden_states, *args, **named)
    if self.config.deterministic_mode:
        raise ConfigError(
            "--deterministic-mode: gated delta net layers then have no kernel that knows "
            "documents or states: leave it out, or these"
        )
    (n, batch), device = hidden_states.shape[:2], hidden_states.device
    n, params = n * self.sp_size, packed_seq_params
    order: Any = _states(params, n, batch, group, device) if group else None
    if params is not None:
        cp = group.size() if group else self.cp_size
        carried = _carried(params, n * cp, batch, cp)
        params, order = DocumentParams.carry(carried), order or order_of(carried, device)
    with _in_order(order):
        return forward(self, hidden_states, *args, packed_seq_params=params, **named)


@around
def norm_with_documents(
    function: Function, self: Any, core_attn_out: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """Wraps `GatedDeltaNet._gated_norm_and_a2a`, which selective recomputation calls again, outside
    of `forward`.
    """
    packed = named.get("packed_seq_params", args[-1] if args else None)
    carried = packed.documents if isinstance(packed, DocumentParams) else None
    with _in_order(None if carried is None else order_of(carried, core_attn_out.device)):
        return function(self, core_attn_out, *args, **named)


@around
def fla_with_documents(
    function: Function, *tensors: torch.Tensor, cu_seqlens: Any = None, **named: Any
) -> Any:
    """Wraps `causal_conv1d`, `chunk_gated_delta_rule` or `chunk_gdn2` of the package fla.

    They take documents as `cu_seqlens` of one batch row: the batch rows [b, n, ...] become one.
    Without documents in force, or ranks over which states pass, nothing changes.
    """
    order = _in_force.get()
    if order is None or cu_seqlens is not None:
        return function(*tensors, cu_seqlens=cu_seqlens, **named)
    named |= zip(("x",) if len(tensors) == 1 else ("q", "k", "v"), tensors, strict=False)
    whole = {name: named.pop(name) for name in _OF_TOKENS if name in named}
    batch, n = next(iter(whole.values())).shape[:2]
    whole = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in whole.items()}
    states: tuple[Any, ...] = (None,)
    if isinstance(order, TokenOrder):
        out, *states = function(**whole, cu_seqlens=order.cu_seqlens, **named)
    elif "x" in whole:
        _prove(order, named["weight"].shape[-1])
        out = order.convolve(
            lambda x, offsets: function(x=x, cu_seqlens=offsets, **named)[0],
            whole["x"], named["weight"].shape[-1],
        )  # fmt: skip
    else:
        for name in ("initial_state", "output_final_state"):
            named.pop(name, None)
        out = order.delta_rule(functools.partial(function, **named), **whole)
    return out.reshape(batch, n, *out.shape[2:]), *states
