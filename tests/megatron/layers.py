"""A small configuration, and the core attention of a layer, as Megatron makes them."""


def configuration(**values):
    """Of two layers of 4 heads without dropout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    usual = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**usual | values)


def core_attention(kind=None, settings=None, **arguments):
    """Ring attention, or the class `kind`, of 4 heads of 8; `settings` are of its configuration."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.adapter.attention import RingDotProductAttention

    config = configuration(num_layers=1)
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    usual = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return (kind or RingDotProductAttention)(config, **usual | arguments)
