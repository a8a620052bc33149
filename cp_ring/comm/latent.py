"""Multi-latent attention: the latent and the rotated shared key travel, and the reader multiplies
by the up-projection.

Keys and values of all heads are made from few numbers of a token: its latent, c numbers, and the
rotated part of its key, r numbers, which all heads share (DeepSeek-V2,
https://arxiv.org/abs/2405.04434). With W the up-projection of head i,

    key of head i   = W_key[i] @ latent, then the shared rotated part        n + r numbers
    value of head i = W_value[i] @ latent                                    e numbers

So c + r numbers of a token travel instead of g * (n + r + e): 576 instead of 40,960 in DeepSeek-V3.

A rank's own keys and values were projected before the call: hop 0 uses them, and autograd computes
the gradients of their latents. For the keys of other ranks, the reader computes its gradients of
the latent, of the rotated part and of the weight. The first two travel to the owner of the keys, as
gradients of keys do. The last stays: it is this rank's share of the gradient of a parameter that
all ranks have.

Tensors have tokens first: latent [s, b, c], k [s, b, g, n + r], v [s, b, g, e].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, override

import torch
from torch import Tensor

from cp_ring.comm.codecs import Decoding
from cp_ring.comm.gradients import GradStream, Updates
from cp_ring.comm.transport import Buffer, Transport
from cp_ring.errors import PlanError
from cp_ring.ops.dtypes import in_one_dtype, sum_dtype, without_autocast
from cp_ring.plan.records import Hop


class Latents(NamedTuple):
    """The latents of a call, [b, s, c] or [s, b, c] as in its format, and the weights of the
    reader.

    key_up: [g, n, c]; value_up: [g, e, c].
    """

    latent: Tensor
    key_up: Tensor
    value_up: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes c, n and e."""
        return self.latent.shape[-1], self.key_up.shape[1], self.value_up.shape[1]


@dataclass(frozen=True, eq=False)
class LatentKeys:
    """Keys and values of multi-latent attention, in place of k in `ring_attention`.

        out = ring_attention(q, LatentKeys(latent, rope, weight, heads, key_dim), None, group)

    Attributes:
        latent: [b, s, c], the normalized latents of this rank's tokens; [s, b, c] for `sbhd`.
        rope: [b, s, r] or [s, b, r], the rotated part of the keys, which all heads share; r may be
            0.
        weight: [heads * (key_dim + e), c], the up-projection (Megatron's `linear_kv_up_proj`,
            DeepSeek's `kv_b_proj`): for each head the part of its key, then the part of its value.
        heads: the number of key/value heads.
        key_dim: the size of a head's own part of the key; the head size of queries is key_dim + r.

    Raises `PlanError` for sizes that do not fit together. Source: DeepSeek-V2,
    https://arxiv.org/abs/2405.04434.
    """

    latent: Tensor
    rope: Tensor
    weight: Tensor
    heads: int
    key_dim: int

    def __post_init__(self) -> None:
        latent, rope, weight, heads = self.latent, self.rope, self.weight, self.heads
        shapes = (
            f"latent {tuple(latent.shape)}, rope {tuple(rope.shape)}, weight {tuple(weight.shape)}"
        )
        if not latent.dim() == rope.dim() == 3 or latent.shape[:2] != rope.shape[:2]:
            raise PlanError(
                "latent and rope must be [batch, tokens, size], or [tokens, batch, size] with "
                f"sbhd, for the same tokens; here {shapes}"
            )
        width = weight.shape[0] if weight.dim() == 2 else 0
        if heads < 1 or width % heads or weight.shape[-1] != latent.shape[2]:
            raise PlanError(
                f"weight must be [heads * (key_dim + value size), {latent.shape[2]}]; here {shapes}"
            )
        if not 1 <= self.key_dim < width // heads:
            raise PlanError(
                f"key_dim={self.key_dim} leaves no value: weight has {width // heads} rows a "
                "head, for its key and its value"
            )
        if len({x.dtype for x in in_one_dtype(latent, rope, weight)}) > 1:
            dtypes = f"{latent.dtype}, {rope.dtype}, {weight.dtype}"
            raise PlanError(f"latent, rope and weight must share one dtype; here {dtypes}")

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys [b, s, heads, key_dim + r] and values [b, s, heads, e]; differentiable."""
        latent, rope, weight = in_one_dtype(self.latent, self.rope, self.weight)
        with without_autocast(latent.device):  # as the ranks that get the latents compute
            both = torch.nn.functional.linear(latent, weight).unflatten(-1, (self.heads, -1))
        shared = rope[:, :, None].expand(-1, -1, self.heads, -1)
        return torch.cat([both[..., : self.key_dim], shared], -1), both[..., self.key_dim :]

    def latents(self) -> Latents:
        """The latents that travel and the weights of the reader; differentiable."""
        latent, _, weight = in_one_dtype(self.latent, self.rope, self.weight)
        by_head = weight.unflatten(0, (self.heads, -1))
        return Latents(latent, by_head[:, : self.key_dim], by_head[:, self.key_dim :])


class LatentCodec(Decoding):
    """Latents and rotated parts travel as one tensor [s, b, c + r]. The rotated part is read off
    the key of the first head.

    v may be wider than the reader's values, as Megatron pads it: the rest is zero.
    """

    name = "latent"
    needs_latents = True

    def __init__(self, k: Tensor, v: Tensor, latent: Tensor, key_up: Tensor, value_up: Tensor):
        super().__init__(k, v)
        self.latent, self.key_dim, self.value_dim = latent, key_up.shape[1], value_up.shape[1]
        self.key_up, self.value_up = (x.reshape(-1, x.shape[-1]) for x in (key_up, value_up))
        self.arrived: Tensor | None = None

    @override
    def encode(self) -> Buffer:
        return (torch.cat([self.latent, self._k[:, :, 0, self.key_dim :]], -1),)

    @override
    def decode(self, coded: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        (self.arrived,) = coded  # until the gradients of the hop's keys are known
        size, heads = self.latent.shape[-1], k.shape[2]
        latent = coded[0].flatten(0, 1)[:, :size]
        k[..., : self.key_dim] = (latent @ self.key_up.T).view(*k.shape[:3], self.key_dim)
        k[..., self.key_dim :] = coded[0][:, :, None, size:]
        if self.value_dim == v.shape[-1]:
            torch.mm(latent, self.value_up.T, out=v.view(-1, heads * self.value_dim))
        else:
            v[..., : self.value_dim] = (latent @ self.value_up.T).view(*v.shape[:3], self.value_dim)
            v[..., self.value_dim :] = 0

    @override
    def gradients(
        self, updates: Updates, transport: Transport | None, wire_dtype: torch.dtype
    ) -> LatentGradients:
        return LatentGradients(self, (self._k, self._v), updates, transport, wire_dtype)


class LatentGradients(GradStream):
    """Gradients of the latents and rotated parts [s, b, c + r] that other ranks read, summed in
    float32 by the owner.

    The gradients of a hop's keys and values are summed first, in their dtype. After the hop, one
    matrix product makes the gradients of the latents, and another one adds to the gradients of the
    weights, in float32.
    """

    def __init__(
        self,
        codec: LatentCodec,
        own: Buffer,
        updates: Updates,
        transport: Transport | None,
        wire_dtype: torch.dtype,
    ):
        self._codec, k = codec, own[0]
        self._sum_dtype = sum_dtype(k.dtype)
        width = codec.latent.shape[-1] + k.shape[-1] - codec.key_dim
        self._owed = k.new_zeros((*k.shape[:2], width), dtype=self._sum_dtype)
        self._weights = [
            torch.zeros_like(x, dtype=self._sum_dtype) for x in (codec.key_up, codec.value_up)
        ]
        self._passed: Tensor | None = None
        super().__init__(updates, transport, own, wire_dtype, (self._owed,))

    @override
    def finish(self) -> Sequence[Tensor]:
        """Return dk, dv, and the gradients of latent, key_up and value_up."""
        self._collect()
        dk, dv = self._home.finish()
        size, heads = self._codec.latent.shape[-1], dk.shape[2]
        dk[:, :, 0, self._codec.key_dim :] += self._owed[..., size:]
        weights = (x.to(dk.dtype).unflatten(0, (heads, -1)) for x in self._weights)
        return dk, dv, self._owed[..., :size].to(dk.dtype), *weights

    @override
    def _collect(self) -> None:
        for transfer, packed in self._arrived():
            target = self._owed
            if transfer.buffer:
                if self._passed is None:
                    self._passed = target.new_zeros((self._num_grads, *target.shape[1:]))
                target = self._passed
            for (start, end), (first, last) in zip(transfer.ranges, packed.ranges, strict=True):
                target[start:end] += self._in[0][first:last]

    @override
    def _leaving(self, hop: Hop) -> Buffer:
        return (self._of_latents(hop),) if hop.index and hop.num_grads else ()

    def _of_latents(self, hop: Hop) -> Tensor:
        """Return the gradients that this rank owes for the latents of a hop's keys, [num_grads, b,
        c + r], with those that it passes on for other ranks.
        """
        total, self._passed = self._passed, None
        if len(hop.tiles):
            dk, dv = self._now.finish()
            codec, latent = self._codec, self._latents(hop).flatten(0, 1)
            shared = dk[..., codec.key_dim :].sum(2, dtype=self._sum_dtype)
            parts = dk[..., : codec.key_dim], dv[..., : codec.value_dim]
            of_key, of_value = (x.flatten(2).flatten(0, 1) for x in parts)
            of_latent = (of_key @ codec.key_up).to(self._sum_dtype) + of_value @ codec.value_up
            for x, of_weight in zip((of_key, of_value), self._weights, strict=True):
                of_weight += x.T @ latent
            mine = torch.cat([of_latent.view(*dk.shape[:2], -1), shared], -1)
            total = mine if total is None else total.add_(mine)
        assert total is not None, "gradients of keys that nobody has read"
        return total.to(self._wire_dtype)

    def _latents(self, hop: Hop) -> Tensor:
        """Return the latents of the tokens in the hop's gradient buffer, [num_grads, b, c]."""
        assert self._codec.arrived is not None, (
            "a hop has gradients of keys that it has not received"
        )
        latent = self._codec.arrived[..., : self._codec.latent.shape[-1]]
        if hop.num_grads == hop.num_keys and not hop.grad_shift.any():
            return latent
        placed = latent.new_zeros((hop.num_grads, *latent.shape[1:]))
        for start, end, shift in zip(
            hop.tiles.k0.tolist(), hop.tiles.k1.tolist(), hop.grad_shift.tolist(), strict=True
        ):
            placed[start + shift : end + shift] = latent[start:end]
        return placed
