"""What the arguments of an attention call stand for: its kernel, what travels, positions, and tensors as the hop loop has them.

Shapes: s tokens of this rank's shard, b batch rows, h query heads, d head size of queries and keys, e head size of values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.checks import AnyPlan
from cp_ring.comm.codecs import CODECS, Plain
from cp_ring.comm.latent import LatentCodec, LatentKeys, Latents
from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.comm.transport import Transport, transport_for
from cp_ring.errors import ConfigError, PlanError
from cp_ring.kernels import AttentionKernel, choose, determinism
from cp_ring.kernels.dropout import COLUMNS, Dropout, mixed
from cp_ring.kernels.logits import LogitKernel
from cp_ring.observe import watchdog
from cp_ring.observe.watchdog import WATCH
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.tables import RankPlan


def keys_and_values(k: Tensor | LatentKeys, v: Tensor | None) -> tuple[Tensor, Tensor, Latents | None]:
    """Keys and values, and the latents that they were made from."""
    if isinstance(k, LatentKeys):
        return *k.expand(), k.latents()
    if v is None:
        raise PlanError("v is missing: only LatentKeys in place of k need none")
    return k, v, None


def by_position_of(
    plan: AnyPlan, group: object, q: Tensor, qkv_format: str, p: float, seed: int | None, slopes: Tensor | Sequence[float] | None
) -> Dropout | None:
    """Dropout and ALiBi of a call whose plan knows the positions of all tokens; None without both."""
    if not 0 <= p < 1:
        raise ConfigError(f"dropout_p={p}: it must be from 0 to below 1")
    if not p and slopes is None:
        return None
    if p and (not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64):
        raise ConfigError(
            f"dropout_seed={seed!r}: dropout needs a whole number of up to 64 bits, the same on all ranks and another in each "
            "call"
        )
    if isinstance(plan, RankPlan):
        name = f"dropout_p={p}" if p else "alibi_slopes"
        raise ConfigError(f"{name}: give the plan of all ranks, which has the positions of tokens, not that of one rank")
    transport = transport_for(group, q.device)  # type: ignore[arg-type]
    positions = torch.from_numpy(plan.layout.positions(transport.rank if transport else 0))
    if plan.layout.rows > 1:
        positions = positions.view(plan.layout.rows, -1).T % (plan.n // plan.layout.rows)
    return Dropout(p, mixed(seed) if seed is not None else 0, positions, slopes=_slopes(slopes, q))


def _slopes(slopes: Tensor | Sequence[float] | None, q: Tensor) -> tuple[float, ...]:
    if slopes is None:
        return ()
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        raise ConfigError("alibi_slopes are constants: detach them, there is no gradient of them")
    found = torch.as_tensor(slopes, dtype=torch.float64)
    if found.shape != q.shape[2:3] or not bool(found.isfinite().all()):
        raise PlanError(f"alibi_slopes must hold one finite number for each of {q.shape[2]} query heads")
    return tuple(found.tolist())


def default_wire(plan: AnyPlan, latents: Latents | None, by_position: Dropout | None) -> str:
    """What keys travel as: latents where there are some, but these have no heads to exchange, and no places for positions."""
    plain = latents is None or plan.ulysses > 1 or by_position is not None
    return Plain.name if plain else LatentCodec.name


def node_size_of_group(transport: Transport | None) -> int:
    """The neighboring ranks of a group on one node, by what the launcher says; 1 for a transport without ranks of a job."""
    ranks = getattr(transport, "ranks", None)
    return 1 if ranks is None else node_size(ranks, ranks_per_node())


def rank_in_job(transport: Transport | None) -> int:
    """This process's rank in the whole job, under which timing and the watchdog know it."""
    if transport is None:
        return dist.get_rank() if dist.is_initialized() else 0
    ranks = getattr(transport, "ranks", None)
    return int(transport.rank if ranks is None else ranks[transport.rank])


def watch(timeout: float) -> None:
    """Starts the thread that watches waits of up to `timeout` seconds. Raises `ConfigError` if that is no length of time."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
        raise ConfigError(f"timeout={timeout!r}: it must be a number of seconds above 0, or None")
    watchdog.start(timeout)
    watchdog.enter("ring_attention", WATCH.place.step)


def kernel_of(
    name: str, q: Tensor, v: Tensor, rank_plan: RankPlan, deterministic: bool | None, dropout: Dropout | None,
    logits: bool,
) -> tuple[AttentionKernel, bool]:  # fmt: skip
    """The kernel of a call, and whether it must be deterministic. With `logits` it also finds the largest ones."""
    with determinism(deterministic) as exact:
        found = choose(name, device=q.device, dtype=q.dtype, d=q.shape[-1], e=v.shape[-1], packed=rank_plan.packed,
                       dropout=dropout is not None)  # fmt: skip
    if dropout is not None:
        found = dropout.kernel(found)
    return LogitKernel(found, 0 if dropout is None else COLUMNS) if logits else found, exact


def marked(q: Tensor, k: Tensor, dropout: Dropout, wire: str) -> tuple[Tensor, Tensor]:
    """q and k [s, b, heads, d] with the positions of their tokens, by which the kernel drops weights and biases scores."""
    if not CODECS[wire].carries_positions:
        asked = f"dropout_p={dropout.p:g}" if dropout.p else "alibi_slopes"
        raise ConfigError(f"wire={wire!r} does not support {asked}, for which positions travel with the keys")
    return dropout.mark(q, k)


def codec_inputs(
    wire: str, latents: Latents | None, rank_plan: RankPlan, qkv_format: str
) -> list[Tensor]:  # fmt: skip
    """The inputs of the codec beside k and v, the tokens of the first one first; none where keys do not travel as latents."""
    if not CODECS[wire].needs_latents:
        return []
    if latents is None:
        raise ConfigError(f"wire={wire!r} needs LatentKeys in place of k")
    if rank_plan.ulysses > 1:
        raise ConfigError(f"wire={wire!r} does not support heads={rank_plan.ulysses}: latents have no heads to exchange")
    if rank_plan.cp == 1:
        return []
    return [latents.latent.transpose(0, 1) if qkv_format == "bshd" else latents.latent, *latents[1:]]


def wire_dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial gradients on the wire, for inputs of `dtype`."""
    return {"input": dtype, "float32": sum_dtype(dtype), "bfloat16": torch.bfloat16}[name]


def tokens_first(x: Tensor, qkv_format: str) -> Tensor:
    """A tensor of the caller's format with tokens first, [s, b, ...]; and back."""
    return x.transpose(0, 1) if qkv_format == "bshd" else x


def one_stream(x: Tensor) -> Tensor:
    """Batch rows with masks of their own, [s, b, ...], as one stream of tokens, [b * s, 1, ...]."""
    return x.transpose(0, 1).flatten(0, 1)[:, None]


def batch_rows(out: Tensor, lse: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
    """Out [s, b, h, e] and lse [b, h, s], from those of one stream."""
    out = out[:, 0].unflatten(0, (batch, -1)).transpose(0, 1)
    return out, None if lse is None else lse[0].unflatten(1, (batch, -1)).transpose(0, 1)
