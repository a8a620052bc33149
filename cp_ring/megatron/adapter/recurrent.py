"""Runs recurrent layers of Megatron, Mamba 2 and gated delta nets, in the order of sequence: in any
layout, with documents and with branches.

Ranks exchange heads, so that each scans whole sequences with some of the heads; or states, so that
each scans its own tokens with all heads (`cp_ring.recurrent`). Both ways run the same code: with
heads, the sequences are pieces on one rank.

Shapes: n tokens of a batch row, s those that this rank holds, b batch rows, cp the context-parallel
size, T the tokens that this rank scans, of all batch rows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as gated_delta_nets
from megatron.core.ssm import mamba_context_parallel as exchange
from megatron.core.ssm import mamba_mixer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from cp_ring.comm.groups import ALONE, transport_for
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import ALONE as ONE_RANK
from cp_ring.megatron.adapter.documents import documents_of
from cp_ring.megatron.adapter.microbatch_mask import MicrobatchMask
from cp_ring.megatron.wrapping import Function, around
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints
from cp_ring.recurrent.pieces import Pieces
from cp_ring.recurrent.proof import verify
from cp_ring.recurrent.scans import DeltaRule, MambaScan
from cp_ring.recurrent.states import StatePassing
from cp_ring.runtime import RUNTIME

_made: WeakKeyDictionary[MicrobatchMask, dict[Any, Tokens]] = RUNTIME.keep(WeakKeyDictionary())
_proven: set[tuple[Any, ...]] = RUNTIME.keep(set())


@dataclass(frozen=True)
class Tokens:
    """How a layer's tokens [s, b, d] become those that it scans, [T, d], and back.

    passing: runs the scans.
    batch: b.
    group: the ranks that exchange heads; None if states travel.
    by_rank: for each token [n * b] of rank after rank, its place in the stream of all batch rows.
    in_sequence: the inverse permutation.
    """

    passing: StatePassing
    batch: int
    group: Any = None
    by_rank: Any = None
    in_sequence: Any = None

    def enter(self, x: Tensor, sections: Sequence[int]) -> Tensor:
        """Return the tokens to scan. With heads, a rank gets its share of each of the sections of
        channels.
        """
        if self.group is None:
            return x.transpose(0, 1).flatten(0, 1)
        cp = self.group.size()
        shares = np.split(np.arange(x.shape[2]), np.cumsum(sections)[:-1])
        order = np.concatenate([share.reshape(cp, -1) for share in shares], 1).reshape(-1)
        x = x.index_select(2, torch.from_numpy(order).to(x.device))
        x = exchange._all_to_all_cp2hp(x, self.group).flatten(0, 1)
        return x.index_select(0, self.in_sequence)

    def leave(self, x: Tensor) -> Tensor:
        """Return tokens that were scanned in the order of the layer: the inverse of `enter`."""
        if self.group is None:
            return x.unflatten(0, (self.batch, -1)).transpose(0, 1).contiguous()
        x = x.index_select(0, self.by_rank).unflatten(0, (-1, self.batch))
        return exchange._all_to_all_hp2cp(x, self.group)


def tokens_of(carried: MicrobatchMask, group: Any, states: bool, width: int, device: Any) -> Tokens:
    """Return the tokens of a microbatch for layers with a convolution over `width` tokens; all of
    its layers share them. The plan of the first microbatch of each kind is proven.
    """
    made = _made.setdefault(carried, {})
    key = (group, states, width, device)
    if key not in made:
        layout, (starts, before) = carried.layout, _starts(carried)
        plan = layout if states else Layout.contiguous(layout.n, 1)
        pieces = Pieces.of(plan, starts, before)
        kind = plan.name, plan.cp, carried.whole.name, width
        if kind not in _proven:
            verify(pieces, starts, before, width)
            _proven.add(kind)
        transport = (states and transport_for(group, device)) or ALONE
        passing = StatePassing(pieces, transport, device)
        orders = {}
        if not states:
            places = torch.cat([carried.places(rank) for rank in range(layout.cp)])  # [n, b]
            by_rank = (places + torch.arange(carried.batch) * len(places)).reshape(-1).to(device)
            orders = {"group": group, "by_rank": by_rank, "in_sequence": by_rank.argsort()}
        made[key] = Tokens(passing, carried.batch, **orders)
    return made[key]


def _starts(carried: MicrobatchMask) -> tuple[Ints, Ints]:
    """Return the tokens of the stream of all batch rows at which documents and branches begin, and
    the tokens whose states these continue, -1 for none.
    """
    starts, before = carried.starts()
    rows = np.arange(carried.batch) * (carried.layout.n // carried.batch)
    every = np.union1d(starts, rows)
    continued = np.full_like(every, -1)
    continued[np.searchsorted(every, starts)] = before
    return every, continued


def _tokens(layer: Any, x: Tensor, packed: Any, width: int) -> Tokens:
    """Return the tokens of x [s, b, d] for a layer: in the documents `packed` if given, else each
    batch row is one document, split by the layout in force.
    """
    (tokens, batch), group = x.shape[:2], layer.cp_ring_group
    carried = documents_of(packed, (batch, tokens), group.size(), in_force())
    return tokens_of(carried, group, layer.pg_collection.cp.size() == 1, width, x.device)


@around
def built(constructor: Function, layer: Any, *args: Any, pg_collection: Any, **named: Any) -> None:
    """Wrap the constructor of a recurrent layer. With states it has all heads of its
    tensor-parallel rank, as without context parallelism.
    """
    groups = copy.copy(pg_collection)
    if in_force().recurrent == "states":
        groups.cp = ONE_RANK
    constructor(layer, *args, pg_collection=groups, **named)
    layer.cp_ring_group = pg_collection.cp


def training_by(train: Function) -> Function:
    """Return a wrapper of a layer's `forward`, which runs `train` on its projected inputs; in
    inference, and where each rank has whole batch rows without documents, Megatron's own forward.
    """

    @around
    def run(
        forward: Function,
        layer: Any,
        hidden_states: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **named: Any,
    ) -> Any:
        alone = packed_seq_params is None and layer.cp_ring_group.size() == 1
        if inference_context is not None or alone:
            more = {"inference_context": inference_context, "packed_seq_params": packed_seq_params}
            return forward(layer, hidden_states, *args, **named, **more)
        x, _ = layer.in_proj(hidden_states)
        return train(layer, x, packed_seq_params)

    return run


def mamba(layer: Any, x: Tensor, packed: Any) -> tuple[Tensor, Any]:
    tokens = _tokens(layer, x, packed, layer.d_conv)
    inner = layer.d_inner_local_tp
    groups = layer.ngroups_local_tp * layer.d_state
    sections = [inner, inner, groups, groups, layer.nheads_local_tp]
    y = tokens.leave(_mamba_scanned(layer, tokens.enter(x, sections), tokens.passing))
    return layer.out_proj(layer.norm(y) if layer.rmsnorm else y)


def _mamba_scanned(layer: Any, x: Tensor, passing: StatePassing) -> Tensor:
    """Return the outputs [T, d] of the convolution and the scan of a Mamba layer, from its z, x, B,
    C and dt. Where no state travels, one kernel does both, which keeps less for backward.
    """
    own = layer.cp
    inner = own.d_inner_local_tpcp
    groups = own.ngroups_local_tpcp * layer.d_state
    weight = own.get_conv1d_weight().squeeze(1)
    bias = own.get_conv1d_bias()
    rates = own.get_dt_bias().float(), -own.get_A_log().float().exp()
    skip = own.get_D().float()
    named = {
        "D": skip.unflatten(0, (-1, layer.headdim)) if layer.D_has_hdim else skip,
        "chunk_size": layer.chunk_size,
    }
    if getattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False):
        named["state_dtype"] = layer.mamba_training_ssm_states_dtype
    if passing.numbers is not None and layer.use_mem_eff_path:
        whole = mamba_mixer.mamba_split_conv1d_scan_combined(
            x[None], weight, bias, *rates, **named, seq_idx=passing.numbers[None],
            headdim=None if layer.D_has_hdim else layer.headdim,
            ngroups=own.ngroups_local_tpcp, norm_before_gate=False,
        )  # fmt: skip
        return whole.squeeze(0)
    z, x, dt = x.split([inner, inner + 2 * groups, own.nheads_local_tpcp], 1)
    fused = mamba_mixer.causal_conv1d_fn

    def convolve(x: Tensor) -> Tensor:
        if fused is None:
            return F.silu(_convolution(x, weight, bias))
        out: Tensor = fused(x.mT, weight, bias, activation=layer.activation)
        return out.mT

    x = passing.convolve(convolve, x, weight, bias, F.silu)
    x, b, c = x.split([inner, groups, groups], 1)
    tensors = {
        "x": x.unflatten(1, (-1, layer.headdim)),
        "dt": dt,
        "B": b.unflatten(1, (-1, layer.d_state)),
        "C": c.unflatten(1, (-1, layer.d_state)),
        "z": z.unflatten(1, (-1, layer.headdim)),
    }
    scan = MambaScan(mamba_mixer.mamba_chunk_scan_combined, *rates, **named)
    return passing.scan(scan, tensors).flatten(1)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution of x [1, T, d] with weight [d, w]."""
    channels, width = weight.shape
    out = F.conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=channels)
    return out[..., : x.shape[1]].mT


def gated_delta_net(layer: Any, x: Tensor, packed: Any) -> tuple[Tensor, Any]:
    tokens = _tokens(layer, x, packed, layer.conv_kernel_dim)
    keys = layer.qk_dim_local_tp
    values = layer.v_dim_local_tp
    heads = layer.num_value_heads // layer.tp_size
    sections = [keys, keys, values, values, heads, heads]
    sections = [*getattr(layer, "in_proj_split_sections", sections)]  # since 0.19
    x = tokens.enter(x, sections)
    out, gate = _delta_net_scanned(layer, x, sections, tokens.passing)

    def finish(out: Tensor, gate: Tensor) -> Tensor:
        return tokens.leave(layer._apply_gated_norm(out, gate).reshape(len(out), -1))

    if not getattr(layer, "recompute_norm_out", False):
        return layer.out_proj(finish(out, gate))
    again = layer.norm_out_checkpoint = CheckpointWithoutOutput()
    projected = layer.out_proj(again.checkpoint(finish, out, gate))
    again.discard_output_and_register_recompute(projected[0])
    return projected


def _delta_net_scanned(
    layer: Any, x: Tensor, sections: list[int], passing: StatePassing
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, h, v] of the convolution and the scan of a gated delta net, and their
    gate, from the sections of channels of its input projection.
    """
    package: Any = gated_delta_nets
    group = layer.pg_collection.cp
    plain = layer.config.deterministic_mode
    own = functools.partial(package.get_parameter_local_cp, dim=0, cp_group=group)
    keys, _, values, gates, *more = (size // group.size() for size in sections)
    x, gate, *features = x.split([2 * keys + values, gates, *more], 1)
    weight = own(layer.conv1d.weight, split_sections=sections[:3]).squeeze(1)
    bias = own(layer.conv1d.bias, split_sections=sections[:3]) if layer.conv_bias else None

    def convolve(x: Tensor) -> Tensor:
        if plain:
            return layer.act_fn(_convolution(x, weight, bias))
        named = {"weight": weight, "bias": bias, "activation": layer.activation}
        out: Tensor = package.causal_conv1d(x=x, **named)[0]
        return out

    x = passing.convolve(convolve, x, weight, bias, layer.act_fn)
    x, value = x.split([2 * keys, values], 1)
    x = x.unflatten(1, (-1, layer.key_head_dim))
    if layer.use_qk_l2norm:
        x = package.l2norm(x.contiguous())
    shared = layer.num_value_heads // layer.num_key_heads
    query, key = (part.repeat_interleave(shared, 1) for part in x.chunk(2, 1))
    value = value.unflatten(1, (-1, layer.value_head_dim))
    tensors = {"q": query, "k": key, "v": value}
    rates = own(layer.A_log), own(layer.dt_bias)
    if hasattr(layer, "_compute_gates"):  # since 0.20
        rows = (part[None] for part in features)
        decay, others = layer._compute_gates(*rates, 1, len(x), *rows)
        tensors |= {name: part[0] for name, part in {"g": decay, **others}.items()}
    else:
        beta, alpha = features
        tensors["g"], tensors["beta"] = layer._compute_g_and_beta(*rates, alpha, beta)
    rule = DeltaRule(layer.gated_delta_rule, plain, use_qk_l2norm_in_kernel=False)
    out = passing.scan(rule, tensors)
    return out, gate.unflatten(1, (-1, layer.value_head_dim))
