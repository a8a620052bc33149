"""Runs recurrent layers of Megatron, Mamba 2, delta nets and gated delta products, in the order of
sequence: in any layout, with documents and with branches.

Ranks exchange heads, so that each scans whole sequences with some of the heads; or states, so that
each scans its own tokens with all heads (`cp_ring.recurrent`). Both ways run the same code: with
heads, the sequences are pieces on one rank.

Shapes: n tokens of a batch row, s those that this rank holds, b batch rows, cp the context-parallel
size, T the tokens that this rank scans, of all batch rows.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as gated_delta_nets
from megatron.core.ssm import mamba_context_parallel as exchange
from megatron.core.ssm import mamba_mixer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from torch import Tensor

from cp_ring.comm.groups import ALONE, transport_for
from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import ALONE as ONE_RANK
from cp_ring.megatron.adapter.documents import documents_of
from cp_ring.megatron.wrapping import Function
from cp_ring.plan.layout import Layout
from cp_ring.recurrent.pieces import Pieces
from cp_ring.recurrent.proof import verify
from cp_ring.recurrent.scans import DeltaRule, MambaScan
from cp_ring.recurrent.states import StatePassing
from cp_ring.runtime import RUNTIME

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
        shares = [part.unflatten(2, (self.group.size(), -1)) for part in x.split(sections, 2)]
        x = exchange._all_to_all_cp2hp(torch.cat(shares, 3).flatten(2), self.group)
        return x.flatten(0, 1).index_select(0, self.in_sequence)

    def leave(self, x: Tensor) -> Tensor:
        """Return tokens that were scanned in the order of the layer: the inverse of `enter`."""
        if self.group is None:
            return x.unflatten(0, (self.batch, -1)).transpose(0, 1).contiguous()
        x = x.index_select(0, self.by_rank).unflatten(0, (-1, self.batch))
        return exchange._all_to_all_hp2cp(x, self.group)


@torch.inference_mode(False)  # layers share them, and backward of a later call saves them
def _tokens(layer: Any, x: Tensor, packed: Any, width: int) -> Tokens:
    """Return the tokens of x [s, b, d] for a layer with a convolution over `width` tokens: in the
    documents `packed` if given, else each batch row is one document, split by the layout in force.

    All such layers of a microbatch share them. The plan of the first microbatch of each kind is
    proven.
    """
    (tokens, batch), group = x.shape[:2], layer.cp_ring_group
    carried = documents_of(packed, (batch, tokens), group.size(), in_force())
    states = layer.pg_collection.cp.size() == 1
    key = group, states, width, x.device
    if key not in carried.made:
        layout, (starts, before) = carried.layout, carried.starts()
        plan = layout if states else Layout.contiguous(layout.n, 1)
        pieces = Pieces.of(plan, starts, before)
        kind = plan.name, plan.cp, carried.whole.name, width
        if kind not in _proven:
            verify(pieces, starts, before, width)
            _proven.add(kind)
        travel = states and group.size() > 1
        transport = (travel and transport_for(group, x.device)) or ALONE
        passing = StatePassing(pieces, transport, x.device)
        orders = {}
        if not states:
            held = [layout.positions(rank).reshape(batch, -1).T for rank in range(layout.cp)]
            by_rank = torch.from_numpy(np.concatenate(held).reshape(-1)).to(x.device)
            orders = {"group": group, "by_rank": by_rank, "in_sequence": by_rank.argsort()}
        carried.made[key] = Tokens(passing, batch, **orders)
    return carried.made[key]


def build(
    letter: str, construct: Function, layer: Any, *args: Any, pg_collection: Any, **named: Any
) -> None:
    """Wrap the constructor of a recurrent layer, of this letter in a pattern. With states it has
    all heads of its tensor-parallel rank, as without context parallelism.
    """
    groups = copy.copy(pg_collection)
    if in_force().recurrent in ("states", letter):
        groups.cp = ONE_RANK
    if "cp_comm_type" not in inspect.signature(construct).parameters:  # before 0.19
        named.pop("cp_comm_type", None)
    construct(layer, *args, pg_collection=groups, **named)
    layer.cp_ring_group = pg_collection.cp
    config = Asked(layer.config)
    parts = f"{config.recompute_modules} {config.offload_modules}"
    if "gdp_" in parts or config.gdp_cutedsl_kernel:
        raise ConfigError(
            "--cp-ring does not support gdp_in_proj and gdp_qkv of --recompute-modules and "
            "--offload-modules, nor --gdp-cutedsl-kernel: leave them out"
        )


def run(
    train: Function,
    forward: Function,
    layer: Any,
    hidden_states: Tensor,
    *args: Any,
    packed_seq_params: Any = None,
    inference_context: Any = None,
    **named: Any,
) -> Any:
    """Wrap a layer's `forward`: run `train`; in inference, and where a rank has whole batch rows
    without documents, Megatron's own forward.
    """
    alone = packed_seq_params is None and layer.cp_ring_group.size() == 1
    if inference_context is not None or alone:
        named |= {"inference_context": inference_context, "packed_seq_params": packed_seq_params}
        return forward(layer, hidden_states, *args, **named)
    if getattr(layer, "recompute_gdn", False) and layer.training:
        return checkpoint(lambda x: train(layer, x, packed_seq_params), False, hidden_states)
    return train(layer, hidden_states, packed_seq_params)


def mamba(layer: Any, hidden: Tensor, packed: Any) -> tuple[Tensor, Any]:
    x, _ = layer.in_proj(hidden)
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
            x[None],
            own.get_conv1d_weight().squeeze(1),
            own.get_conv1d_bias(),
            *rates,
            **named,
            seq_idx=passing.numbers[None],
            headdim=None if layer.D_has_hdim else layer.headdim,
            ngroups=own.ngroups_local_tpcp,
            norm_before_gate=False,
        )
        return whole.squeeze(0)
    z, x, dt = x.split([inner, inner + 2 * groups, own.nheads_local_tpcp], 1)
    x = _convolved_like_mamba(layer, x, passing, mamba_mixer.causal_conv1d_fn)
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


def _convolved_like_mamba(layer: Any, x: Tensor, passing: StatePassing, kernel: Any) -> Tensor:
    """Return the convolution of x [T, d] in a Mamba layer, or in one in its place."""
    weight = layer.cp.get_conv1d_weight().squeeze(1)
    bias = layer.cp.get_conv1d_bias()

    def fused(x: Tensor) -> Any:
        return kernel(x.mT, weight, bias, activation=layer.activation).mT

    return _convolved(passing, x, weight, bias, F.silu, kernel and fused)


def _convolved(
    passing: StatePassing, x: Tensor, weight: Tensor, bias: Any, activation: Any, fused: Any
) -> Tensor:
    """Return the causal convolution of x [T, d] with weight [d, w] by `fused`, which takes x [1, T,
    d] and activates too, or by torch if that is None.
    """

    def plain(x: Tensor) -> Any:
        channels, width = weight.shape
        out = F.conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=channels)
        return activation(out[..., : x.shape[1]].mT)

    return passing.convolve(fused or plain, x, weight, bias, activation)


def gated_delta_product(layer: Any, hidden: Tensor, packed: Any) -> tuple[Tensor, Any]:
    """Train a layer whose state learns several values at each token (DeltaProduct, arXiv
    2502.10297). Its gate does not travel.
    """
    x, _ = layer.in_proj(hidden)
    tokens = _tokens(layer, x, packed, layer.d_conv)
    rules = layer.num_householder
    inner = layer.d_inner_local_tp
    shared = layer.ngroups_local_tp * layer.d_state, layer.nheads_local_tp
    sections = [inner] * rules + [size for size in shared for _ in range(rules + 1)]
    gate, x = x.split([inner, sum(sections)], 2)
    y = tokens.leave(_product_scanned(layer, tokens.enter(x, sections), tokens.passing))
    return layer.out_proj(layer.norm(y, gate) if layer.rmsnorm else y)


def _product_scanned(layer: Any, x: Tensor, passing: StatePassing) -> Tensor:
    """Return the outputs [T, d] of the convolution and the scan of a gated delta product, from its
    values and keys of each rule, queries, write strengths of each rule, and decay.
    """
    from megatron.core.ssm import gated_delta_product as package

    own = layer.cp
    rules = layer.num_householder
    values = own.d_inner_local_tpcp
    heads = own.nheads_local_tpcp
    groups = own.ngroups_local_tpcp
    keys = groups * layer.d_state
    features = rules * values + (rules + 1) * keys
    beta, decay = layer._compute_gating(x[None, :, features:])
    x = _convolved_like_mamba(layer, x[:, :features], passing, package.causal_conv1d_fn)
    value, x = x.split([rules * values, (rules + 1) * keys], 1)
    x = package.l2_norm(x.unflatten(1, (rules + 1, groups, -1)).contiguous())
    x = x.repeat_interleave(heads // groups, 2)
    tensors = {
        "q": x[:, rules],
        "k": x[:, :rules],
        "v": value.unflatten(1, (rules, heads, -1)),
        "g": decay[0],
        "beta": beta[0].unflatten(0, (-1, rules)),
    }

    def kernel(k: Tensor, v: Tensor, beta: Tensor, **named: Any) -> Any:
        by_rule = {name: x.flatten(1, 2) for name, x in (("k", k), ("v", v), ("beta", beta))}
        return layer.gdp_kernel(**named, **by_rule, num_householder=rules)

    return passing.scan(DeltaRule(kernel), tensors).flatten(1)


def gated_delta_net(layer: Any, hidden: Tensor, packed: Any) -> tuple[Tensor, Any]:
    keys = layer.qk_dim_local_tp
    values = layer.v_dim_local_tp
    heads = layer.num_value_heads // layer.tp_size
    sections = [keys, keys, values, values, heads, heads]
    sections = [*getattr(layer, "in_proj_split_sections", sections)]  # since 0.19
    return _delta_net(layer, layer.in_proj(hidden)[0], sections, packed)


def kimi_delta_attention(layer: Any, hidden: Tensor, packed: Any) -> tuple[Tensor, Any]:
    """Train a delta net whose state decays by channel (Kimi Linear, arXiv 2510.26692)."""
    *features, decay, gate = layer.in_proj(hidden)[0].split(layer.in_proj_split_sections, 2)
    parts = [*features, gate, decay, layer.beta_proj(hidden)[0]]
    return _delta_net(layer, torch.cat(parts, 2), [part.shape[2] for part in parts], packed)


def _delta_net(layer: Any, x: Tensor, sections: list[int], packed: Any) -> tuple[Tensor, Any]:
    """Train a delta net on its queries, keys, values, gate and whatever else it needs."""
    tokens = _tokens(layer, x, packed, layer.conv_kernel_dim)
    out, gate = _delta_net_scanned(layer, tokens.enter(x, sections), sections, tokens.passing)

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
    """Return the outputs [T, h, v] of the convolution and the scan of a delta net, and their gate,
    from the sections of channels of its input projection.
    """
    package: Any = gated_delta_nets
    group = layer.pg_collection.cp
    plain = layer.config.deterministic_mode
    own = functools.partial(package.get_parameter_local_cp, dim=0, cp_group=group)
    keys, _, values, gates, *more = (size // group.size() for size in sections)
    x, gate, *features = x.split([2 * keys + values, gates, *more], 1)
    weight = own(layer.conv1d.weight, split_sections=sections[:3]).squeeze(1)
    bias = own(layer.conv1d.bias, split_sections=sections[:3]) if layer.conv_bias else None

    def fused(x: Tensor) -> Any:
        named = {"weight": weight, "bias": bias, "activation": layer.activation}
        return package.causal_conv1d(x=x, **named)[0]

    x = _convolved(passing, x, weight, bias, layer.act_fn, None if plain else fused)
    x, value = x.split([2 * keys, values], 1)
    x = x.unflatten(1, (-1, layer.key_head_dim))
    if layer.use_qk_l2norm:
        x = package.l2norm(x.contiguous())
    shared = layer.num_value_heads // layer.num_key_heads
    query, key = (part.repeat_interleave(shared, 1) for part in x.chunk(2, 1))
    value = value.unflatten(1, (-1, layer.value_head_dim))
    tensors = {"q": query, "k": key, "v": value}
    rates = own(layer.A_log), own(layer.dt_bias)
    named: dict[str, Any] = {}
    if getattr(layer, "use_gate_in_kernel", False):
        named = dict(zip(("A_log", "dt_bias"), rates, strict=True), use_gate_in_kernel=True)
        named |= {
            name: getattr(layer.config, f"kda_{name}") for name in ("safe_gate", "lower_bound")
        }
    if hasattr(layer, "_compute_gates"):  # since 0.20
        rows = (part[None] for part in features)
        decay, others = layer._compute_gates(*rates, 1, len(x), *rows)
        tensors |= {name: part[0] for name, part in {"g": decay, **others}.items()}
    else:
        beta, alpha = features
        tensors["g"], tensors["beta"] = layer._compute_g_and_beta(*rates, alpha, beta)
    rule = DeltaRule(layer.gated_delta_rule, plain, use_qk_l2norm_in_kernel=False, **named)
    out = passing.scan(rule, tensors)
    return out, gate.unflatten(1, (-1, layer.value_head_dim))
