"""Computes logits and loss for some tokens at a time: see `cp_ring.megatron.loss_chunks`."""

from __future__ import annotations

from cp_ring.patches.patch import Patch

PATCH = Patch(
    what="computes logits and losses for --cp-ring-loss-chunk tokens at a time",
    why="the logits of all tokens of a rank need more memory than everything else that a long "
    "sequence needs",
    needed=lambda args, options: options.enabled and options.loss_chunk,
    wraps={
        "megatron.core.models.gpt.GPTModel._postprocess": "cp_ring.megatron.loss_chunks.in_chunks",
        "megatron.core.models.hybrid.hybrid_model."
        "HybridModel.forward": "cp_ring.megatron.loss_chunks.in_chunks",
        "megatron.core.transformer.multi_token_prediction."
        "_compute_mtp_acceptance_counts": "cp_ring.megatron.loss_chunks.counted_in_chunks",
    },
)
