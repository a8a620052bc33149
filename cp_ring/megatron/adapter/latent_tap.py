"""Finds the latents of Megatron's multi-latent attention, which travel with --cp-ring-wire latent.

Megatron projects the latent to keys and values in `linear_kv_up_proj`, and returns it beside them
before it calls core attention. Core attention then uses Megatron's own keys and values for hop 0,
and sends latents.

Shapes: s tokens of this rank, b microbatch, c `kv_lora_rank`, g heads of this rank, n
`qk_head_dim`, e `v_head_dim`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.latent import Latents
from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.asked import Asked, recomputes_attention
from cp_ring.megatron.wrapping import Function, around
from cp_ring.options import CallSettings
from cp_ring.plan.sizes.attention_sizes import WIRES
from cp_ring.runtime import RUNTIME

_PLAIN = "ColumnParallelLinear", "TEColumnParallelLinear"
_WITH_NORM = "TELayerNormColumnParallelLinear"


class LatentTap:
    """Holds the latents of a layer during one forward pass, until core attention takes them.

    seen: the input of the layer's `linear_kv_up_proj`, and this module.
    """

    def __init__(self, tp_group: Any) -> None:
        self._tp_group = tp_group
        self.seen: tuple[Tensor, Any] | None = None

    def take(self, key_dim: int, value_dim: int) -> Latents:
        """Return the latents [s, b, c] ([s, c] for packed documents) and the weights [g, n, c] and
        [g, e, c]. All are differentiable.

        Raises `ConfigError` if the layer's keys come from elsewhere.
        """
        if self.seen is None:
            raise ConfigError(
                "--cp-ring-wire latent: keys of this layer do not come from linear_kv_up_proj: "
                "give --cp-ring-wire plain"
            )
        (latent, module), self.seen = self.seen, None
        _check(module)
        if type(module).__name__ == _WITH_NORM:
            latent = _normalized(latent, module)
        weight = module.weight
        if module.config.gradient_accumulation_fusion:
            weight = _IntoMainGrad.apply(weight)
        by_head = weight.unflatten(0, (-1, key_dim + value_dim))
        return Latents(
            self._of_all_tokens(latent, module.config), by_head[:, :key_dim], by_head[:, key_dim:]
        )

    def _of_all_tokens(self, latent: Tensor, config: Any) -> Any:
        """Gather the latents of all tensor-parallel ranks. The backward pass sums the gradients of
        these ranks once.
        """
        from megatron.core.tensor_parallel import mappings

        if self._tp_group.size() == 1:
            return latent
        if config.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(latent, group=self._tp_group)
        return mappings.copy_to_tensor_model_parallel_region(latent, group=self._tp_group)


def latent_problem(model: Any, ulysses: int, settings: CallSettings) -> str | None:
    """Return one line that says why latents cannot travel with these flags or this configuration,
    or None.
    """
    args = Asked(model)
    wire = f"--cp-ring-wire {settings.wire}"
    plain = "or give --cp-ring-wire plain"
    if not args.multi_latent_attention:
        return f"{wire} needs --multi-latent-attention: give it, {plain}"
    if ulysses > 1:
        return (
            f"{wire} does not support --cp-ring-heads {ulysses} or --cp-comm-type a2a: give "
            "--cp-ring-wire plain"
        )
    other = args.first(
        "fp8",
        "fp4",
        "delay_wgrad_compute",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "cache_mla_latents",
    )
    if other:
        return f"{wire} does not support {other}: leave it out, {plain}"
    if recomputes_attention(args):
        return (
            f"{wire} does not support recomputation of core_attn alone "
            "(--recompute-granularity selective): leave core_attn out of --recompute-modules, "
            f"{plain}"
        )
    return None


def check_latent(model: Any, ulysses: int, settings: CallSettings) -> None:
    """Raise `ConfigError` if the settings ask for latents on the wire and latents cannot travel."""
    travel = settings.wire in WIRES and WIRES[settings.wire].latent
    if travel and (line := latent_problem(model, ulysses, settings)):
        raise ConfigError(line)


def hand_latents(make: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the method of a multi-latent attention layer that makes queries, keys and values, and
    returns the latents last: give these to core attention, if they travel.
    """
    made = make(self, *args, **kwargs)
    if tap := getattr(self.core_attention, "tap", None):
        tap.seen = made[-1], self.linear_kv_up_proj
    return made


@RUNTIME.cache()
def linked(attention_class: Any) -> Any:
    """Return a subclass of an attention layer's class whose core attention has access to the
    latents of the layer (see `hand_latents`). The same class always gives the same subclass.
    """
    make = attention_class.get_query_key_value_tensors
    own = {"get_query_key_value_tensors": around(hand_latents)(make)}
    return functools.update_wrapper(
        type("Linked", (attention_class,), own), attention_class, updated=()
    )


def _check(module: Any) -> None:
    """Raise `ConfigError` unless the module computes the product of its weight and its input."""
    name = type(module).__name__
    if name not in (*_PLAIN, _WITH_NORM):
        raise ConfigError(
            f"--cp-ring-wire latent does not support linear_kv_up_proj of {name}: give "
            "--cp-ring-wire plain"
        )
    if getattr(module, "bias", None) is not None and module.bias.numel():
        raise ConfigError(
            "--cp-ring-wire latent does not support a bias of linear_kv_up_proj: give "
            "--cp-ring-wire plain"
        )


def _normalized(latent: Tensor, module: Any) -> Tensor:
    """Normalize the input as TransformerEngine's linear layer with a norm does."""
    weight = module.layer_norm_weight
    weight = weight + 1 if getattr(module, "zero_centered_gamma", False) else weight
    size = latent.shape[-1:]
    if module.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(latent, size, weight, module.eps)
    return torch.nn.functional.layer_norm(latent, size, weight, module.layer_norm_bias, module.eps)


class _IntoMainGrad(torch.autograd.Function):
    """Returns the weight; the backward pass adds its gradient to `main_grad`, as fused linear
    layers do. Megatron ignores the gradient of autograd for such a weight.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor | None:  # type: ignore[no-untyped-def]
        main = getattr(ctx.weight, "main_grad", None)
        if main is None:
            return gradient
        main.add_(gradient)
        return None
