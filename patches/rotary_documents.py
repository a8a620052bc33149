"""Corrects the rotary position embeddings of packed documents that are split together, as one
sequence, over the ranks: see `cp_ring.megatron.adapter.rotary`.
"""

from __future__ import annotations

from cp_ring.megatron.flags.checks_documents import splits_packed
from cp_ring.patches.patch import Patch

PATCH = Patch(
    what="corrects the rotary embeddings of packed documents that are split together as one "
    "sequence, as with --dataloader-inter-document-masking",
    why="Megatron assumes that each document is split separately: the positions are wrong without "
    "a warning, or it crashes",
    needed=lambda args, options: (
        options.enabled and (args.dataloader_inter_document_masking or splits_packed(args, options))
    ),
    wraps={
        "megatron.core.models.common.embeddings.rope_utils."
        "_apply_rotary_pos_emb_thd": "cp_ring.megatron.adapter.rotary.turn_documents",
    },
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6156",
)
