"""What stands for TransformerEngine in a program without a GPU: Megatron's class of its attention,
whose calls over several ranks go through TransformerEngine's own function, with the ring beneath.
"""

import copy

import torch.distributed as dist
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention

from cp_ring.integrations.transformer_engine import use_ring
from tests.integrations import te_stand_in

CALLS = []
"""The numbers of the layers that called the function."""


class TEDotProductAttention(DotProductAttention):
    """Megatron's local attention, and at context parallel size 2 and more what its class for
    TransformerEngine makes of a call.
    """

    package = None

    def __init__(self, config, layer_number, *args, pg_collection=None, **named):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, layer_number, *args, pg_collection=pg_collection, **named)
        self.group, self.window = pg_collection.cp, None
        every = config.window_attn_skip_freq
        if config.window_size and is_layer_window_attention(
            config.window_size, every, layer_number
        ):
            self.window = tuple(config.window_size)

    def forward(self, query, key, value, mask, *args, packed_seq_params=None, **named):
        if self.group.size() == 1 and packed_seq_params is None:
            return super().forward(query, key, value, mask, *args, **named)
        CALLS.append(self.layer_number)
        packed = packed_seq_params
        offsets = packed and (packed.cu_seqlens_q, packed.cu_seqlens_q_padded)
        out = te_stand_in.forward(
            self.package, query, key, value, qkv_format="thd" if packed else "sbhd",
            attn_mask_type="padding_causal" if packed else "causal", window_size=self.window,
            cu_seqlens=offsets or (None, None), cp_group=self.group,
            cp_global_ranks=dist.get_process_group_ranks(self.group),
            softmax_offset=self.softmax_offset, softmax_scale=self.softmax_scale,
            layer_number=self.layer_number,
        )  # fmt: skip
        return out.flatten(-2)


def install():
    """Put the ring beneath; Megatron's local layers then have this attention."""
    with te_stand_in.installed() as package:
        use_ring(strict=True)
    TEDotProductAttention.package = package
    LocalSpecProvider.core_attention = lambda self: TEDotProductAttention
