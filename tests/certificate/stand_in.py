"""A core attention with context parallelism of its own, in place of TransformerEngine's: each rank
gathers all keys and attends densely. Its attributes are faults that people found in others.
"""

import torch
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

from cp_ring import Layout
from tests.programs.beneath import TEDotProductAttention


class StandInRing(TEDotProductAttention):
    """Causal, with windows and packed documents.

    believed: the rank for which each rank takes itself. tail: how many tokens too many of a padded
    document are seen.
    """

    believed, tail = None, 0

    def forward(self, query, key, value, mask, *args, packed_seq_params=None, **named):
        packed, cp = packed_seq_params, self.group.size()
        q, k, v = (x[:, None] if packed else x for x in (query, key, value))
        real = padded = [0, len(q) * cp]
        if packed:
            real, padded = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q_padded.tolist()
        layout = Layout.per_document_zigzag(padded, cp)
        places = [torch.from_numpy(layout.positions(rank)) for rank in range(cp)]
        order = torch.cat(places).argsort()
        k, v = (torch.cat(all_gather(x.contiguous(), self.group))[order] for x in (k, v))
        rank = self.group.rank() if self.believed is None else self.believed
        allowed = self.allowed(places[rank][:, None], real, padded)
        blind = ~allowed.any(1, keepdim=True)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, allowed | blind, scale=self.softmax_scale, enable_gqa=True
        )
        out = out.masked_fill(blind, 0).permute(2, 0, 1, 3).flatten(2)
        return out[:, 0] if packed else out

    def allowed(self, query, real, padded):
        document, key = torch.full((padded[-1],), -1), torch.arange(padded[-1])
        for i, start in enumerate(padded[:-1]):
            end = start + real[i + 1] - real[i]
            document[start : end + self.tail * (end < padded[i + 1])] = i
        seen = (document[query] >= 0) & (document[query] == document) & (key <= query)
        return seen & (query - key <= self.window[0]) if self.window else seen


def faulty(**fault):
    """The class with this fault."""
    return type("FaultyRing", (StandInRing,), fault)
