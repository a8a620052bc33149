"""Makes multi-token prediction find the next token of the same document: see
`cp_ring.megatron.next_tokens`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import megatron.core.transformer.multi_token_prediction as module

    from cp_ring.megatron import next_tokens

    if "tensors" in inspect.signature(module.roll_tensor).parameters:
        raise ImportError("multi-token prediction of Megatron's development branch is not known")
    yield module, "roll_tensor", next_tokens.roll_in_documents


PATCH = Patch(
    what="multi-token prediction shifts tokens within their documents under every layout, and "
    "counts tokens over all ranks",
    why="Megatron's shift leaks across packed documents, and its loss scale depends on how tokens "
    "are split over ranks",
    needed=lambda args, options: options.enabled and args.mtp_num_layers,
    wraps={
        "megatron.core.transformer.multi_token_prediction."
        "process_mtp_loss": "cp_ring.megatron.next_tokens.with_all_tokens"
    },
    replacements=_replacements,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/6205",
)
