"""Layer specifications of Megatron with ring attention, for use without any patch.

`--spec cp_ring.megatron.specs gpt_local` (or `gpt_te`) selects a whole GPT layer, `hybrid_local`
the layers of a hybrid model. `with_ring_attention` changes any specification.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.adapter.attention import RingDotProductAttention
from cp_ring.megatron.wrapping import Function, replaced

try:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
except ImportError:
    TEDotProductAttention = None

_REPLACED = {DotProductAttention, TEDotProductAttention} - {None}


def ring_core_attention(core_attention: Any) -> Any:
    """Return `RingDotProductAttention` in place of a stock core attention, given as a class,
    `ModuleSpec` or `functools.partial`.

    Raises `ConfigError` that names any other core attention.
    """
    if isinstance(core_attention, ModuleSpec):
        return dataclasses.replace(
            core_attention, module=ring_core_attention(core_attention.module)
        )
    if isinstance(core_attention, functools.partial):
        return functools.partial(
            ring_core_attention(core_attention.func),
            *core_attention.args,
            **core_attention.keywords,
        )
    if core_attention in _REPLACED:
        return RingDotProductAttention
    own = RingDotProductAttention, _Rejected
    if isinstance(core_attention, type) and issubclass(core_attention, own):
        return core_attention
    name = getattr(core_attention, "__name__", repr(core_attention))
    raise ConfigError(
        f"--cp-ring replaces DotProductAttention and TEDotProductAttention, not {name}: give "
        "--cp-ring-beneath te in place of --cp-ring, or a stock layer specification"
    )


def _ring_or_rejected(core_attention: Any) -> Any:
    """Return ring attention, or a class that raises the `ConfigError` about `core_attention` when a
    layer is built with it.
    """
    try:
        return ring_core_attention(core_attention)
    except ConfigError as error:
        return type("RejectedAttention", (_Rejected,), {"rejection": str(error)})


class _Rejected:
    rejection: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(self.rejection)


def with_ring_attention(spec: Any) -> Any:
    """Return a copy of a layer or block specification with ring attention as the core attention of
    every attention layer.

        spec = with_ring_attention(get_gpt_layer_local_spec())

    It copies `ModuleSpec`s, dataclasses of submodules, and lists of them, and shares everything
    else with the argument. A core attention that ring attention cannot replace raises `ConfigError`
    only when a layer with it is built, because specifications of hybrid models have layers that a
    model may not use.
    """
    if isinstance(spec, list | tuple):
        return type(spec)(with_ring_attention(item) for item in spec)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name == "core_attention" and value is not None:
            changes[field.name] = _ring_or_rejected(value)
        elif (
            field.name == "module"
            and isinstance(value, type)
            and issubclass(value, MultiLatentAttention)
        ):
            from cp_ring.megatron.adapter.latent_tap import linked

            changes[field.name] = linked(value)
        elif field.name not in ("params", "module"):
            changes[field.name] = with_ring_attention(value)
    return dataclasses.replace(spec, **changes)


class LayerOfFlags(ModuleSpec):
    """The transformer layer of the command line with ring attention, for --spec.

    Megatron before 0.19 imports it before the flags are parsed, so its fields are made from the
    flags when they are first read.
    """

    def __init__(self, provider: Function) -> None:
        self._provider = provider

    module = property(lambda self: self._made().module)
    params = property(lambda self: self._made().params)
    submodules = property(lambda self: self._made().submodules)
    metainfo = property(lambda self: self._made().metainfo)

    def _made(self) -> ModuleSpec:
        # imported here because programs on megatron.core alone may lack megatron.training
        from megatron.training import get_args

        return with_ring_attention(self._provider(**_options(self._provider, get_args())))


def _options(provider: Function, args: argparse.Namespace) -> dict[str, Any]:
    asked = Asked(args)
    frequency = args.moe_layer_freq
    other = ["experimental_attention_variant", "heterogeneous_layers_config_path"]
    if args.num_experts and {1} != {*(frequency if isinstance(frequency, list) else [frequency])}:
        other.append("moe_layer_freq")
    if provider is not _hybrid_local_stack and asked.first(*other):
        raise ConfigError(
            "--spec cp_ring.megatron.specs makes every layer alike, of softmax attention, whatever "
            f"{asked.first(*other)} says: leave --spec out and give --cp-ring"
        )
    # what the class alone does not reach
    other = ["dataloader_inter_document_masking"]
    if asked.transformer_impl == "local":
        other.append("mtp_num_layers")
    if asked.cp > 1 and not asked.cp_ring and asked.first(*other):
        raise ConfigError(
            f"--spec cp_ring.megatron.specs does not support {asked.first(*other)}: give --cp-ring"
        )
    return compat.known_arguments(provider, vars(args))


gpt_local = LayerOfFlags(gpt_layer_specs.get_gpt_layer_local_spec)
"""A GPT layer of Megatron's own modules with ring attention."""

gpt_te = LayerOfFlags(gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec)
"""A GPT layer of TransformerEngine's modules with ring attention."""


def _hybrid_local_stack() -> ModuleSpec:
    """Return Megatron's hybrid layers without TransformerEngine; Megatron has them for
    quantization.
    """
    from megatron.core.post_training.modelopt.hybrid import model_specs

    with replaced((model_specs, "Norm", WrappedTorchNorm)):
        return model_specs.get_mamba_stack_modelopt_spec(local_core_attention=True)


hybrid_local = LayerOfFlags(_hybrid_local_stack)
"""The layers of a hybrid model of Megatron's own modules with ring attention, which
`pretrain_hybrid.py` needs on the CPU. Mamba and gated delta net layers need CUDA.
"""
