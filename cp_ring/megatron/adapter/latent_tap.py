"""Finds the latents of Megatron's multi-latent attention, which travel with --cp-ring-wire latent.

Megatron projects the latent to keys and values in `linear_kv_up_proj`, before it calls core
attention. A forward hook on that module sees its input and holds its weight. Core attention then
uses Megatron's own keys and values for hop 0, and sends latents.

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
from cp_ring.options import CallSettings
from cp_ring.plan.sizes.attention_sizes import WIRES
from cp_ring.runtime import RUNTIME

_PLAIN = ("ColumnParallelLinear", "TEColumnParallelLinear")
_WITH_NORM = "TELayerNormColumnParallelLinear"


class LatentTap:
    """Holds the input of a layer's `linear_kv_up_proj` during one forward pass, until core
    attention takes it.
    """

    def __init__(self, tp_group: Any) -> None:
        self._tp_group = tp_group
        self.linked = False
        self._seen: tuple[Tensor, Any] | None = None

    def see(self, module: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Keep the input of `linear_kv_up_proj`; this is its forward hook."""
        latent = inputs[0]
        # If only the projection is recomputed, its input is a leaf and attention is not called
        # again.
        if not (torch.is_grad_enabled() and latent.is_leaf and latent.requires_grad):
            self._seen = latent, module

    def take(self, key_dim: int, value_dim: int) -> Latents:
        """Return the latents [s, b, c] ([s, c] for packed documents) and the weights [g, n, c] and
        [g, e, c]. All are differentiable.

        Raises `ConfigError` if the layer's keys come from elsewhere.
        """
        if self._seen is None:
            raise ConfigError(
                "--cp-ring-wire latent: keys of this layer do not come from linear_kv_up_proj: "
                "give --cp-ring-wire plain"
            )
        (latent, module), self._seen = self._seen, None
        if type(module).__name__ == _WITH_NORM:
            latent = _normalized(latent, module)
        weight = module.weight
        if getattr(module.config, "gradient_accumulation_fusion", False):
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


def link(attention: Any) -> None:
    """Give the core attention of a multi-latent attention layer access to its latents, if these
    travel. Each call of the layer begins with it, and the first one has an effect: constructors of
    subclasses may have replaced `linear_kv_up_proj` and core attention.
    """
    tap = getattr(attention.core_attention, "tap", None)
    if tap is not None and not tap.linked:
        _check(attention.linear_kv_up_proj)
        attention.linear_kv_up_proj.register_forward_hook(tap.see)
        tap.linked = True


@RUNTIME.cache()
def linked(attention_class: Any) -> Any:
    """Return a subclass of an attention layer's class whose core attention has access to the
    latents of the layer (see `link`). The same class always gives the same subclass.
    """

    class Linked(attention_class):
        @functools.wraps(attention_class.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            link(self)
            return super().forward(*args, **kwargs)

    return functools.update_wrapper(Linked, attention_class, updated=())


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
