"""Makes multi-token prediction find the next token of the same document: see
`cp_ring.megatron.next_tokens`.
"""

from __future__ import annotations

from cp_ring.patches.patch import Patch

_MODULE = "megatron.core.transformer.multi_token_prediction"

PATCH = Patch(
    what="multi-token prediction shifts tokens within their documents under every layout, and "
    "counts tokens over all ranks",
    why="Megatron's shift leaks across packed documents, and its loss scale depends on how tokens "
    "are split over ranks",
    needed=lambda args, options: options.enabled and args.mtp_num_layers,
    wraps={
        f"{_MODULE}.roll_tensor": "cp_ring.megatron.next_tokens.roll_in_documents",
        f"{_MODULE}.process_mtp_loss": "cp_ring.megatron.next_tokens.with_all_tokens",
    },
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/6205",
)
