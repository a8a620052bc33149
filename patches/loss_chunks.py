"""Computes logits and loss for some tokens at a time: see `cp_ring.megatron.loss_chunks`."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import megatron.core.transformer.multi_token_prediction as module
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from cp_ring.megatron.loss_chunks import counted_in_chunks, in_chunks

    yield GPTModel, "_postprocess", in_chunks(GPTModel._postprocess)
    yield HybridModel, "forward", in_chunks(HybridModel.forward)
    name = "_compute_mtp_acceptance_counts"
    yield module, name, counted_in_chunks(getattr(module, name))


PATCH = Patch(
    what="computes logits and losses for --cp-ring-loss-chunk tokens at a time",
    why="the logits of all tokens of a rank need more memory than everything else that a long "
    "sequence needs",
    needed=lambda args, options: options.enabled and options.loss_chunk,
    replacements=_replacements,
)
