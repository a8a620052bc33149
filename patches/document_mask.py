"""Lets multi-latent attention use documents and masks in sbhd.

Stock multi-latent attention treats any `packed_seq_params` as thd when it makes queries and keys,
and asks for rotary embeddings itself.
"""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.wrapping import Function, arguments_of
from cp_ring.patches.patch import Patch


def _without_documents(make: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    from cp_ring.megatron.adapter.documents import DocumentParams
    from cp_ring.megatron.adapter.rotary import positions_in_force, tokens_of

    inputs = arguments_of(make, self, *args, **kwargs)
    packed = inputs.get("packed_seq_params")
    selected = None
    if isinstance(packed, DocumentParams):
        selected = tokens_of(packed, self.pg_collection.cp)
        inputs["packed_seq_params"] = None
    with positions_in_force(selected):
        return make(**inputs)


PATCH = Patch(
    what="lets multi-latent attention make its queries and keys in sbhd with "
    "--cp-ring-document-mask and --cp-ring-mask-kinds",
    why="multi-latent attention drops the batch dimension whenever it gets packed_seq_params, "
    "whatever their format",
    needed=lambda args, options: options.enabled and (options.document_mask or options.mask_kinds),
    wraps={
        "megatron.core.transformer.multi_latent_attention."
        "MLASelfAttention.get_query_key_value_tensors": _without_documents,
    },
)
