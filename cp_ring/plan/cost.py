"""The cost of one layer's attention by a proven plan: FLOP, bytes that travel, and memory. Its time
is `Plan.time`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints
from cp_ring.plan.report import Report
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.updates import MAX_PARTS

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of one layer's attention. Arrays are [cp, cp], rank by hop; FLOPs are float64, bytes
    int64.

    Forward FLOPs count two matrix products over the allowed pairs, backward FLOPs five. `bytes_in`
    and `bytes_out` are the keys and values of the forward pass; the backward pass moves them again,
    beside the gradients. `memory` names every buffer and its bytes on the rank where it is largest.
    `decode_flops` are the codec's FLOPs: (forward, backward).
    """

    forward_flops: Floats
    backward_flops: Floats
    bytes_in: Ints
    bytes_out: Ints
    gradient_bytes_in: Ints
    gradient_bytes_out: Ints
    memory: dict[str, int]
    decode_flops: tuple[Floats, Floats]


def cost(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> Cost:
    """Return the cost of a proven plan for tensors of these sizes."""
    work = report.work.astype(np.float64)
    keys, gradients = sizes.on_wire()
    forward, backward = sizes.pair_flops
    arriving = report.keys_in.astype(np.float64) * sizes.batch
    decode_forward, decode_backward = sizes.codec.decode_flops(sizes.kv_heads, sizes.latent)
    return Cost(
        forward_flops=work * forward,
        backward_flops=work * backward,
        bytes_in=report.keys_in * keys,
        bytes_out=report.keys_out * keys,
        gradient_bytes_in=report.grads_in * gradients,
        gradient_bytes_out=report.grads_out * gradients,
        memory=memory(report, sizes, num_slots),
        decode_flops=(arriving * decode_forward, arriving * decode_backward),
    )


def memory(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> dict[str, int]:
    """Return the bytes of every buffer on the rank where it is largest. Only the first two buffers
    are kept from forward to backward.
    """
    tokens = int(report.tokens_per_rank.max())
    width, element, wire, float32 = sizes.key_width, sizes.element, sizes.wire_element, 4
    heads = sizes.batch * sizes.heads
    arriving, leaving, returning = (
        int(table.max(initial=0)) for table in (report.keys_in, report.grads_out, report.grads_in)
    )
    return {
        "kept: q, k, v, out": tokens * (sizes.query_width + sizes.out_width + width) * element,
        "kept: lse": tokens * heads * float32,
        "forward: partial results of out": MAX_PARTS * tokens * sizes.out_width * element,
        "forward: out in float32": tokens * sizes.out_width * float32,
        "both: key and value slots": num_slots * arriving * sizes.wire_key_bytes,
        **({} if sizes.codec.plain else _codec_memory(sizes, tokens, arriving, leaving)),
        "backward: partial results of dq": MAX_PARTS * tokens * sizes.query_width * element,
        "backward: dq in float32": tokens * sizes.query_width * float32,
        "backward: dk, dv in float32": tokens * width * float32,
        "backward: a hop's dk, dv in float32": leaving * width * float32,
        "backward: a hop's dk, dv that leave": leaving * sizes.wire_gradient_width * wire,
        "backward: dk, dv that arrive": returning * sizes.wire_gradient_width * wire,
    }


def _codec_memory(
    sizes: AttentionSizes, tokens: int, arriving: int, leaving: int
) -> dict[str, int]:
    """Return the bytes of a codec's buffers other than the slots."""
    buffers = {
        "both: own keys and values, encoded": tokens * sizes.wire_key_bytes,
        "both: a hop's keys and values, decoded": arriving * sizes.key_width * sizes.element,
    }
    if sizes.codec.latent and sizes.latent is not None:
        weight = sizes.kv_heads * (sizes.latent.nope + sizes.latent.value) * sizes.latent.latent
        buffers["backward: a hop's dk, dv before the up-projection"] = (
            leaving * sizes.key_width * sizes.element
        )
        buffers["backward: gradients of latents in float32"] = (
            tokens * sizes.wire_gradient_width * 4
        )
        buffers["backward: gradient of the up-projection in float32"] = weight * 4
    return buffers
