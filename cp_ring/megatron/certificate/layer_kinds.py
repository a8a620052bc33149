"""Finds the distinct kinds of attention layers in a job, by windows, sinks and communication, and
the masks of its microbatches.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.certificate.batch import PREFIX
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.layer_pattern import (
    attention_layers,
    config_of_layer,
    predicting_layers,
)

# scores that a rank may hold in a probe of whole batch rows
MAX_SCORES = 1 << 24
GRAIN = 16  # chunks are multiples of this many tokens, as packed kernels need


@dataclass(frozen=True)
class LayerKind:
    """One kind of attention layer, as the flags declare it, and the length of its probe.

    Attributes:
        numbers: the numbers of the layers of this kind, counted from 1.
        window: how many keys before and after itself a query sees; -1 means any number.
        scale: factor of the scores.
        sink: `vanilla`, `off-by-one` or `learnable`.
        heads, groups: query heads and key/value heads of a tensor-parallel rank.
        d, e: head sizes of keys and values.
        tokens: tokens of a batch row that shows the window's edge, or fewer, so that the probe can
            compare all pairs.
        comm_type: Megatron's `cp_comm_type` of the layer.
    """

    numbers: tuple[int, ...]
    window: tuple[int, int]
    scale: float
    sink: str
    heads: int
    groups: int
    d: int
    e: int
    tokens: int
    comm_type: str

    @property
    def layer(self) -> int:
        """The number of the first layer of this kind."""
        return self.numbers[0]

    @property
    def layer_name(self) -> str:
        """Return a name, such as `layer 2 (window 128, learnable sinks)`."""
        about = [f"window {self.window[0]}" if self.window[0] >= 0 else "no window"]
        about += [self.comm_type] * (self.comm_type != "p2p")
        about += [f"{self.sink} sinks"] * (self.sink != "vanilla")
        return f"layer {self.layer} ({', '.join(about)})"


def find_layer_kinds(args: argparse.Namespace, config: Any) -> list[LayerKind]:
    """Return every distinct kind of attention layer of the job."""
    alike: dict[Any, list[int]] = {}
    for layer in sorted({*attention_layers(args, config), *predicting_layers(args)}):
        key_heads = config_of_layer(config, layer).num_query_groups
        kind = declared_window(config, layer), comm_types.type_of(args, layer), key_heads
        alike.setdefault(kind, []).append(layer)
    tp, unit = args.tensor_model_parallel_size, unit_of(args)
    heads = config.num_attention_heads // tp
    most = math.isqrt(MAX_SCORES // heads // args.micro_batch_size)
    scale, d, e = declared_scale(config)
    sink, kinds = config.softmax_type, []
    for (window, comm_type, key_heads), numbers in alike.items():
        units = min(-(-2 * (window[0] + 1) // unit), most // unit)
        groups = heads if config.multi_latent_attention else max(1, key_heads // tp)
        sizes = heads, groups, d, e, max(1, units) * unit
        kinds.append(LayerKind(tuple(numbers), window, scale, sink, *sizes, comm_type))
    return kinds


def unit_of(args: argparse.Namespace) -> int:
    """Return the number of tokens of which a probed batch row has a multiple."""
    return 2 * int(args.context_parallel_size) * GRAIN


def masks_of(args: argparse.Namespace, item: Any = None) -> tuple[str, ...]:
    """Return the kinds of mask that the job's microbatches can have, or the one that an `item` of
    its data declares.
    """
    used = settings.current()
    if used.kinds:
        return tuple(PREFIX + kind for kind in used.kinds[: 1 if item else None])
    rows = "documents" if used.document_mask else "causal"
    if item:
        return ("packed" if item.get("cu_seqlens") is not None else rows,)
    if settings.ring().whole_rows and rows == "causal":
        return ("packed",)
    flags = vars(args)
    # only pretrain_vlm.py has this flag; it packs batch rows that it pads, whatever the value
    vision = "use_packed_sequence" in flags
    tuned = flags.get("sft") or flags.get("perform_rl_step")
    return (rows, "packed") if used.document_mask or vision or tuned else (rows,)


def declared_window(config: Any, layer: int) -> tuple[int, int]:
    """Return the window of a layer by Megatron's own rule, without the code that is probed."""
    from megatron.core.transformer.utils import is_layer_window_attention  # slow to import

    size = config.window_size
    if isinstance(size, int):
        raise ConfigError(
            f"--cp-ring-certify: window_size {size} is one number, which a class of its own reads "
            "by layer; the certificate knows windows of two numbers"
        )
    if is_layer_window_attention(size, config.window_attn_skip_freq, layer):
        return int(size[0]), int(size[1])
    return -1, -1


def declared_scale(config: Any) -> tuple[float, int, int]:
    """Return the factor of the scores, and the head sizes of keys and values, by Megatron's own
    rules.
    """
    if not config.multi_latent_attention:
        d = config.kv_channels
        return config.softmax_scale or d**-0.5, d, d
    d = config.qk_head_dim + config.qk_pos_emb_head_dim
    factor, mscale = config.rotary_scaling_factor, config.mscale_all_dim
    stretch = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return stretch * stretch * d**-0.5, d, config.v_head_dim
