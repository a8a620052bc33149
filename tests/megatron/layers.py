"""The core attention of a layer, as Megatron makes it."""


def core_attention(kind=None, settings=None, **arguments):
    """Ring attention, or the class `kind`, of 4 heads of 8; `settings` are of its configuration."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.adapter.attention import RingDotProductAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        use_cpu_initialization=True,
    )  # fmt: skip
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    usual = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return (kind or RingDotProductAttention)(config, **usual | arguments)
