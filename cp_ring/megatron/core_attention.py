"""Ring attention with the interface of Megatron's core attention.

Shapes: s tokens of this rank, b microbatch, h query and g key/value heads of this tensor-parallel rank, d and dv head sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from cp_ring.attention import ring_attention
from cp_ring.errors import ConfigError
from cp_ring.megatron.settings import current, group_of, make_plan


class RingDotProductAttention(MegatronModule):
    """Core attention over the context-parallel group: each rank holds s of the n = s * cp tokens, split by the layout in force.

    The arguments are those that Megatron gives to core attention. `config.apply_query_key_layer_scaling` changes nothing here:
    stock attention divides and multiplies the scores by the layer number to fit fp16, and ring attention keeps them in float32.

    Raises `ConfigError` for what ring attention does not serve.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.cp_group = group_of(pg_collection, "cp")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.current_max_attn_logits = None
        self.settings = current()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_layer(config, layer_number, attention_type, dropout, cp_comm_type)
        _check_mask(attn_mask_type)
        if any(value is not None for value in unknown.values()):
            raise ConfigError(f"ring attention does not know these core attention arguments: {', '.join(unknown)}")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries to every rank's keys.

        Args:
            query: [s, b, h, d].
            key: [s, b, g, d].
            value: [s, b, g, dv].
            attention_mask: must be None; the mask is the declared one, `attn_mask_type`.

        Returns:
            [s, b, h * dv], in the dtype of `query`.

        Raises:
            ConfigError: for a mask tensor, a bias, or packed sequences.
        """
        if packed_seq_params is not None:
            raise ConfigError("--cp-ring does not serve packed sequences (packed_seq_params); train without sequence packing")
        if attention_bias is not None:
            raise ConfigError("--cp-ring does not serve an attention bias")
        if attention_mask is not None:
            raise ConfigError(
                "--cp-ring computes its mask itself, but the batch holds an attention mask: "
                "give --no-create-attention-mask-in-dataloader"
            )
        if any(value is not None for value in unknown.values()):
            raise ConfigError(f"ring attention does not know these inputs: {', '.join(unknown)}")
        mask = _check_mask(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        cp = self.cp_group.size()
        plan = make_plan(mask, query.shape[0] * cp, cp, self.settings.layout, self.settings.route)
        out = ring_attention(
            query,
            key,
            value,
            plan,
            self.cp_group if cp > 1 else None,
            softmax_scale=self.softmax_scale,
            kernel=self.settings.kernel,
            num_slots=self.settings.num_slots,
            wire_dtype=self.settings.wire_dtype,
            qkv_format="sbhd",
        )
        return out.reshape(*out.shape[:2], -1)


def _check_mask(mask_type: Any) -> str:
    name = str(getattr(mask_type, "name", mask_type))
    if name not in ("causal", "no_mask"):
        raise ConfigError(f"--cp-ring serves the attention mask types causal and no_mask, not {name}")
    return name


def _check_layer(config: Any, layer_number: int, attention_type: str, dropout: float, cp_comm_type: str | None) -> None:
    if attention_type != "self":
        raise ConfigError(f"--cp-ring serves self attention; layer {layer_number} is {attention_type} attention")
    if dropout:
        raise ConfigError(f"--cp-ring does not serve attention dropout: give --attention-dropout 0, not {dropout}")
    if cp_comm_type not in (None, "p2p"):
        raise ConfigError(f"--cp-ring serves --cp-comm-type p2p, not {cp_comm_type} (layer {layer_number})")
    if getattr(config, "window_size", None) is not None:
        raise ConfigError(f"--cp-ring does not serve sliding windows: --window-size {config.window_size}")
    softmax_type = getattr(config, "softmax_type", "vanilla")
    if softmax_type != "vanilla":
        raise ConfigError(f"--cp-ring serves --softmax-type vanilla, not {softmax_type}")
    if getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False):
        raise ConfigError("--cp-ring does not record attention logits: leave out --qk-clip and --log-max-attention-logit")
