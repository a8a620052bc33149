"""What probes of attention need where latents travel: tensors from which keys are made.

Shapes: b batch rows, n tokens of a batch row, g heads, c size of a latent, r of the rotated part of
a key, k of a head's own part of it, e of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.latent import Latents
from cp_ring.megatron.certificate.tested_layer import CHANNELS

Drawn = Callable[..., Tensor]


def copies(k: Tensor, v: Tensor, key_dim: int) -> Latents:
    """Latents [b, n, c] that hold the first channels of the values [b, n, g, e] as they are. Keys
    are zero, as `k` must be.
    """
    heads, size = v.shape[2:]
    channels = min(CHANNELS, heads * size)
    value_up = torch.eye(heads * size, channels, dtype=v.dtype, device=v.device).unflatten(
        0, (heads, size)
    )
    return Latents(v.flatten(2)[..., :channels], k.new_zeros(heads, key_dim, channels), value_up)


def draw(config: Any, heads: int, tokens: Drawn, drawn: Drawn) -> dict[str, Tensor]:
    """Random latents [b, n, 1, c], rotated parts [b, n, 1, r] and weight [g, k + e, c].

    `tokens(heads, size)` draws [b, n, heads, size], `drawn(*shape)` anything, both N(0, 1).
    """
    c = config.kv_lora_rank
    weight = drawn(heads, config.qk_head_dim + config.v_head_dim, c) * c**-0.5
    return {"latent": tokens(1, c), "rope": tokens(1, config.qk_pos_emb_head_dim), "weight": weight}


def keys(latent: Tensor, rope: Tensor, weight: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [b, n, g, k + r] and values [b, n, g, e], as multi-latent attention defines them;
    differentiable.
    """
    both = torch.einsum("bnxc,gdc->bngd", latent, weight)
    shared = rope.expand(-1, -1, weight.shape[0], -1)
    return torch.cat([both[..., :key_dim], shared], -1), both[..., key_dim:]
