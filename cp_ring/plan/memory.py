"""The memory of one layer's attention by a proven plan."""

from __future__ import annotations

from cp_ring.plan.report import Report
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.updates import MAX_PARTS


def memory(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> dict[str, int]:
    """Return the bytes of every buffer on the rank where it is largest. Only the first two buffers
    are kept from forward to backward.
    """
    tokens = int(report.tokens_per_rank.max())
    width, element, float32 = sizes.key_width, sizes.element, 4
    of_keys, of_gradients = sizes.on_wire()
    heads = sizes.batch * sizes.heads
    arriving, leaving, returning = (
        int(table.max(initial=0)) for table in (report.keys_in, report.grads_out, report.grads_in)
    )
    buffers = {
        "kept: q, k, v, out": tokens * (sizes.query_width + sizes.out_width + width) * element,
        "kept: lse": tokens * heads * float32,
        "forward: partial results of out": MAX_PARTS * tokens * sizes.out_width * element,
        "forward: out in float32": tokens * sizes.out_width * float32,
        "both: key and value slots": num_slots * arriving * of_keys,
    }
    if not sizes.codec.plain:
        buffers["both: own keys and values, encoded"] = tokens * of_keys
        buffers["both: a hop's keys and values, decoded"] = arriving * width * element
    if sizes.codec.latent and sizes.latent is not None:
        weight = sizes.kv_heads * sizes.latent.decoded
        buffers |= {
            "backward: a hop's dk, dv before the up-projection": leaving * width * element,
            "backward: gradients of latents in float32": (
                tokens * of_gradients // sizes.wire_element * float32
            ),
            "backward: gradient of the up-projection in float32": weight * float32,
        }
    return buffers | {
        "backward: partial results of dq": MAX_PARTS * tokens * sizes.query_width * element,
        "backward: dq in float32": tokens * sizes.query_width * float32,
        "backward: dk, dv in float32": tokens * width * float32,
        "backward: a hop's dk, dv in float32": leaving * width * float32,
        "backward: a hop's dk, dv that leave": leaving * of_gradients,
        "backward: dk, dv that arrive": returning * of_gradients,
    }
