"""The distinct kinds of attention in a job: windows and sinks of its layers, and the masks that its microbatches can bring."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

SCORES = 1 << 24  # of one probe on one rank, beyond which it takes a smaller window


@dataclass(frozen=True)
class Kind:
    """One kind of attention layer under one kind of mask, as declared by the flags, and the size of its probe.

    Attributes:
        layer: the first layer of this kind, from 1.
        layers: how many there are.
        mask: `causal`, `documents` (boundaries in sbhd) or `packed` (thd with padding).
        window: keys before and after a query that it sees; -1 any. `probed` is what the probe uses for it.
        scale: factor of the scores.
        sink: `vanilla`, `off-by-one` or `learnable`.
        heads, groups, d, e: query heads, key/value heads of a tensor-parallel rank, head sizes of keys and values.
        tokens: tokens of the probe's rows.
    """

    layer: int
    layers: int
    mask: str
    window: tuple[int, int]
    probed: tuple[int, int]
    scale: float
    sink: str
    heads: int
    groups: int
    d: int
    e: int
    tokens: int

    @property
    def layer_name(self) -> str:
        """As in `layer 2 (window 128, learnable sinks)`."""
        about = [f"window {self.window[0]}" if self.window[0] >= 0 else "no window"]
        if self.probed != self.window:
            about[0] += f", probed as {self.probed[0]}"
        about += [f"{self.sink} sinks"] if self.sink != "vanilla" else []
        return f"layer {self.layer} ({', '.join(about)})"


def kinds(args: argparse.Namespace, config: Any, masks: tuple[str, ...], chunk: int, whole: bool = False) -> list[Kind]:
    """Every distinct kind of layer of the job under each of `masks`; `chunk` is the least tokens of a chunk of a probe.

    With `whole` each rank is to hold the scores of whole rows, so that large windows make smaller probes.
    """
    windows: dict[tuple[int, int], list[int]] = {}
    for layer in range(1, args.num_layers + 1):
        windows.setdefault(declared_window(config, layer), []).append(layer)
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    heads = config.num_attention_heads // tp
    scale, d, e = declared_scale(config)
    groups = heads if getattr(config, "multi_latent_attention", False) else max(1, config.num_query_groups // tp)
    sink = getattr(config, "softmax_type", "vanilla")
    found = []
    for window, layers in windows.items():
        tokens, probed = _size(window, cp, SCORES // heads if whole else SCORES * cp // heads, chunk)
        kind = Kind(layers[0], len(layers), "", window, probed, scale, sink, heads, groups, d, e, tokens)
        found += [replace(kind, mask=mask) for mask in masks]
    return found


def declared_window(config: Any, layer: int) -> tuple[int, int]:
    """The window of a layer by Megatron's own rule."""
    from megatron.core.transformer import utils

    size = getattr(config, "window_size", None)
    rule = getattr(utils, "is_layer_window_attention", None)
    if size is None or (rule is not None and not rule(size, getattr(config, "window_attn_skip_freq", None), layer)):
        return -1, -1
    return int(size[0]), int(size[1])


def declared_scale(config: Any) -> tuple[float, int, int]:
    """Factor of the scores, and head sizes of keys and values, by Megatron's own rules."""
    given = getattr(config, "softmax_scale", None)
    if not getattr(config, "multi_latent_attention", False):
        return given or config.kv_channels**-0.5, config.kv_channels, config.kv_channels
    d = config.qk_head_dim + config.qk_pos_emb_head_dim
    factor, mscale = config.rotary_scaling_factor, config.mscale_all_dim
    stretch = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return stretch * stretch * d**-0.5, d, config.v_head_dim


def _size(window: tuple[int, int], cp: int, area: int, chunk: int) -> tuple[int, tuple[int, int]]:
    """Tokens n of a probe that shows the window's edge, and the window; a smaller one where n * n would exceed `area`."""
    step = 2 * cp * 16  # chunks are multiples of 16 tokens, which packed kernels want
    least = -(-2 * cp * chunk // step) * step
    wanted = -(-2 * (window[0] + 1) // step) * step
    most = max(least, int(area**0.5) // step * step)
    if wanted <= most:
        return max(least, wanted), window
    return most, (most // 3, window[1])
