"""Reads Megatron's arguments, or the fields of its configuration, by name, and says which of them
ring attention does not support.

Nothing heavy is imported here: flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cp_ring.errors import ConfigError

_SOFTMAX_TYPES = "vanilla", "off-by-one", "learnable"
_FLAGS = {"fp8": "fp8-format", "fp4": "fp4-format", "nccl_ub": "use-nccl-ub"}
"""Arguments whose flag has another name."""


class Asked:
    """Megatron's parsed arguments, the fields of a `TransformerConfig`, or the words of a command
    line. An argument that is missing there is None.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, None)

    @property
    def tp(self) -> int:
        """Return the tensor-parallel size."""
        return self.tensor_model_parallel_size or 1

    @property
    def cp(self) -> int:
        """Return the context-parallel size."""
        return self.context_parallel_size or 1

    @property
    def key_heads(self) -> int | None:
        """Return the number of key/value heads of a layer. Arguments hold it only with
        --group-query-attention, a configuration always.
        """
        if self.multi_latent_attention or self.group_query_attention is False:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads

    def first(self, *names: str) -> str:
        """Return the flag of the first of these arguments that is given, or ""."""
        return next((_flag(name) for name in names if getattr(self, name)), "")

    def shown(self, name: str) -> str:
        """Return the flag of an argument with its value, such as `--lr 0.1`."""
        value = getattr(self, name)
        return f"{_flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _flag(name: str) -> str:
    return "--" + _FLAGS.get(name, name).replace("_", "-")


Check = Callable[[Asked, Any], str | None]
"""Returns one line `what is wrong: what to type` if the job of these arguments and settings cannot
run, else None.
"""


def reject_where(checks: Iterable[Check], args: Any, options: Any) -> None:
    """Raise `ConfigError` with the lines of all checks that reject the job."""
    asked = Asked(args)
    if lines := [line for check in checks if (line := check(asked, options))]:
        raise ConfigError(*lines)


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


def window_of_layer(model: Any, layer: int) -> tuple[int, int]:
    """Return how many keys before and after its own position a query of layer `layer`, counted from
    1, sees; -1 means all. `model` is Megatron's arguments or the configuration of the layer.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    window = model.window_size
    if not is_layer_window_attention(window, model.window_attn_skip_freq, layer):
        return -1, -1
    return int(window[0]), int(window[1])


def recomputes_attention(args: Asked) -> bool:
    """Return True if core attention is recomputed without the rest of its layer."""
    modules = args.recompute_modules or ["core_attn"]
    return args.recompute_granularity == "selective" and "core_attn" in modules
