"""Makes Megatron's attention layers build ring attention as their core attention.

Layer specifications of hybrid, heterogeneous and ModelOpt models hold the stock class from the
moment they are imported. So the class is replaced where layers are built: in the constructors of
`Attention` and `MultiLatentAttention`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils.collate import default_collate_fn_map

from cp_ring.errors import ConfigError
from cp_ring.megatron.wrapping import Function, replaced
from cp_ring.patches.patch import Patch
from cp_ring.plan.mask import Mask

_ADAPTER = "cp_ring.megatron.adapter"


def _with_all_gather(constructor: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build Megatron's sparse attention with all_gather, whatever type other layers use, because
    Megatron splits its tokens.
    """
    if "cp_comm_type" in kwargs:
        kwargs["cp_comm_type"] = "all_gather"
    constructor(self, *args, **kwargs)


def _with_any_type(check: Function, config: Any) -> None:
    """Call the check with all_gather, which Megatron's sparse attention requires and gets, in place
    of the type of the other layers. Its own eager attention, which is replaced, requires it too.
    """
    kinds = config.cp_comm_type
    sparse = config.experimental_attention_variant == "dsa"
    if sparse or config.transformer_impl == "local":
        kinds = ["all_gather"] * len(kinds) if isinstance(kinds, list) else "all_gather"
    with replaced((config, "cp_comm_type", kinds)):
        check(config)


def _with_ring(
    constructor: Function, self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    from cp_ring.megatron.specs import ring_core_attention

    # sparse attention has its own context parallelism
    if type(self).__name__ != "AbsorbedMLASelfAttention":
        core = ring_core_attention(submodules.core_attention)
        submodules = dataclasses.replace(submodules, core_attention=core)
    constructor(self, config, submodules, *args, **kwargs)
    self.core_attention.positions_by_group = True


def _on_its_group(
    forward: Function, self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any
) -> Any:
    """Use the rotary embeddings of packed documents on the group of ranks that shares the
    microbatch.
    """
    from cp_ring.megatron.adapter.documents import group_of_microbatch

    groups = self.pg_collection
    group = group_of_microbatch(packed_seq_params, groups.cp)
    if group is not groups.cp:
        groups = copy.copy(groups)
        groups.cp = group
    with replaced((self, "pg_collection", groups)):
        return forward(self, *args, packed_seq_params=packed_seq_params, **kwargs)


def _with_cache(adjust: Function, self: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
    if context is not None and self.config.context_parallel_size > 1:
        raise ConfigError(
            "generation from a cache of keys needs --context-parallel-size 1: load the checkpoint "
            "at that size"
        )
    return adjust(self, context, *args, **kwargs)


def _of_whole_images(
    constructor: Function, self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"{type(self).__name__}: its configuration has context_parallel_size "
            f"{config.context_parallel_size}, but Megatron's encoders give each rank whole images: "
            "set it to 1"
        )
    constructor(self, config, *args, **kwargs)


@contextmanager
def _collating_masks() -> Iterator[None]:
    """Let torch's data loader collate samples with masks: it makes a list of the masks."""
    default_collate_fn_map[Mask] = lambda masks, **_: list(masks)
    yield
    del default_collate_fn_map[Mask]


PATCH = Patch(
    what="builds RingDotProductAttention where an attention layer would build DotProductAttention "
    "or TEDotProductAttention; rejects caches of keys at context parallel size 2 and more, "
    "and image encoders that have a context parallel size; a "
    "microbatch on a group of ranks of its own has the rotary positions of that group",
    why="one flag gives ring attention to every kind of model, without a layer specification for "
    "each; Megatron splits the rotary embeddings of packed documents over all "
    "context-parallel ranks",
    wraps={
        "megatron.core.transformer.attention.Attention.__init__": _with_ring,
        "megatron.core.transformer.attention.Attention.forward": _on_its_group,
        "megatron.core.transformer.attention."
        "Attention._adjust_key_value_for_inference": _with_cache,
        "megatron.core.transformer.multi_latent_attention."
        "MultiLatentAttention.__init__": _with_ring,
        "megatron.core.transformer.multi_latent_attention."
        "MultiLatentAttention.forward": _on_its_group,
        "megatron.core.transformer.multi_latent_attention."
        "MLASelfAttention.get_query_key_value_tensors": f"{_ADAPTER}.latent_tap.hand_latents",
        "megatron.core.transformer.multi_token_prediction."
        "MultiTokenPredictionLayer.__init__": f"{_ADAPTER}.attention.numbered",
        "megatron.core.models.common.vision_module.vision_module."
        "VisionModule.__init__": _of_whole_images,
        "megatron.core.transformer.transformer_config."
        "TransformerConfig.__post_init__": _with_any_type,
        "megatron.core.transformer.experimental_attention_variant.absorbed_mla."
        "AbsorbedMLASelfAttention.__init__": _with_all_gather,
    },
    within=_collating_masks,
)
