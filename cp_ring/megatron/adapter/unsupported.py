"""Says why ring attention cannot be the core attention of a layer.

Nothing heavy is imported here: flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.adapter.asked import Asked

_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def layer_problem(config: Any, layer_number: int, attention_type: str) -> str | None:
    """Return why ring attention cannot be the core attention of a layer with this configuration, or
    None.
    """
    if attention_type != "self":
        return (
            f"--cp-ring supports self attention; layer {layer_number} is {attention_type} attention"
        )
    if config.softmax_type not in _SOFTMAX_TYPES:
        return (
            f"--cp-ring supports --softmax-type {', '.join(_SOFTMAX_TYPES)}, not "
            f"{config.softmax_type}"
        )
    layer = Asked(config)
    if layer.fp8_dot_product_attention or layer.fp8_multi_head_attention:
        return (
            "--cp-ring does not support fp8_dot_product_attention and fp8_multi_head_attention: "
            "switch them off"
        )
    if layer.attn_logit_softcapping:  # an option of Megatron after 0.20
        return "--cp-ring does not support attn_logit_softcapping: leave it out"
    return None


def window_problem(window: Any, causal: bool = True) -> str | None:
    """Return why a window is not (left, right) with each side at least -1, and right at most 0 in a
    causal layer; None if it is.
    """
    if isinstance(window, int):
        return (
            f"--window-size {window} is one number, for core attention classes that set the window "
            "of their layer: keep these with --cp-ring-beneath te (use_ring), or give two numbers"
        )
    if len(window) != 2 or any(side != int(side) or side < -1 for side in window):
        return (
            f"--window-size {window} is not two numbers of keys, before and after a query: give "
            "integers of at least -1 (all)"
        )
    if causal and window[1] > 0:
        return (
            f"--window-size {window}: a causal layer sees nothing after its own position: give "
            f"{window[0]},0"
        )
    return None


def recomputes_attention(args: Asked) -> bool:
    """Return True if core attention is recomputed without the rest of its layer."""
    modules = args.recompute_modules or ["core_attn"]
    return args.recompute_granularity == "selective" and "core_attn" in modules
