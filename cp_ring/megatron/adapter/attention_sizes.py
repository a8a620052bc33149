"""Sizes of a layer's attention, from Megatron's arguments or configuration."""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.plan.sizes.attention_sizes import AttentionSizes, LatentSizes


def attention_sizes(model: Any, tp: int = 1, wire: str = "plain") -> AttentionSizes:
    """Return the sizes of one layer's attention on a rank, with tensor parallel size `tp`.

    `model` is Megatron's arguments or the configuration of the layer. A missing setting has
    Megatron's default.
    """
    asked = Asked(model)

    def size(name: str, default: int) -> int:
        return int(getattr(asked, name) or default)

    heads = size("num_attention_heads", 1)
    groups = size("key_heads", heads)
    width = value_width = size("kv_channels", size("hidden_size", heads) // heads)
    latent = None
    # the ring moves the keys and values of every head unless latents travel
    if asked.multi_latent_attention:
        latent = LatentSizes(
            size("kv_lora_rank", 512),
            size("qk_pos_emb_head_dim", 64),
            size("qk_head_dim", 128),
            size("v_head_dim", 128),
        )
        width = latent.nope + latent.rope
        value_width = latent.value
    dtype = "bf16" if asked.bf16 else "fp16" if asked.fp16 else "fp32"
    return AttentionSizes(
        max(1, heads // tp),
        max(1, groups // tp),
        width,
        value_width,
        dtype,
        batch=size("micro_batch_size", 1),
        wire=wire,
        latent=latent,
    )
