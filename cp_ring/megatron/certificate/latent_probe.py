"""Makes the tensors that attention probes need when latents travel: latents and the weights that
make keys and values of them.

Shapes: b batch rows, n tokens of a batch row, g heads, c size of a latent, r size of the rotated
part of a key, k size of a head's own part of a key, e size of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.latent import Latents
from cp_ring.megatron.certificate.probe_batch import CHANNELS

Drawn = Callable[..., Tensor]


def copies(k: Tensor, v: Tensor, key_dim: int) -> Latents:
    """Return latents [b, n, c] that hold the first channels of the values [b, n, g, e] unchanged.
    Keys, and so `k`, must be zero.
    """
    heads, size = v.shape[2:]
    channels = min(CHANNELS, heads * size)
    value_up = torch.eye(heads * size, channels, dtype=v.dtype, device=v.device).unflatten(
        0, (heads, size)
    )
    return Latents(v.flatten(2)[..., :channels], k.new_zeros(heads, key_dim, channels), value_up)


def draw(config: Any, heads: int, tokens: Drawn, drawn: Drawn) -> dict[str, Tensor]:
    """Draw random latents [b, n, 1, c], rotated parts [b, n, 1, r] and a weight [g, k + e, c].

    `tokens(heads, size)` draws [b, n, heads, size] and `drawn(*shape)` any shape, both from N(0,
    1).
    """
    c = config.kv_lora_rank
    weight = drawn(heads, config.qk_head_dim + config.v_head_dim, c) * c**-0.5
    return {"latent": tokens(1, c), "rope": tokens(1, config.qk_pos_emb_head_dim), "weight": weight}


def keys(latent: Tensor, rope: Tensor, weight: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys [b, n, g, k + r] and values [b, n, g, e] as multi-latent attention defines them;
    differentiable.
    """
    both = torch.einsum("bnxc,gdc->bngd", latent, weight)
    shared = rope.expand(-1, -1, weight.shape[0], -1)
    return torch.cat([both[..., :key_dim], shared], -1), both[..., key_dim:]
