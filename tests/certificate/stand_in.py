"""A core attention with context parallelism of its own, in place of TransformerEngine's: each rank
gathers all keys and attends densely. `faulty` gives it the faults that people found in others.
"""

import torch
from torch.distributed.nn.functional import all_gather

from tests.programs.beneath import TEDotProductAttention


def _zigzag(edges, rank, cp):
    """The tokens of a rank: two chunks of each document [start, end)."""
    found = []
    for start, end in edges:
        chunks = torch.arange(start, end).chunk(2 * cp)
        found += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(found)


def _documents(packed, n):
    """(start, end, padded end) of each document."""
    if packed is None:
        return [(0, n, n)]
    real, padded = packed.cu_seqlens_q.diff(), packed.cu_seqlens_q_padded
    lengths = zip(real.tolist(), padded[:-1].tolist(), padded[1:].tolist(), strict=True)
    return [(start, start + length, end) for length, start, end in lengths]


class StandInRing(TEDotProductAttention):
    """Megatron's interface of core attention; causal, with windows, sinks and packed documents."""

    FAULTS = (
        "positions of the wrong rank",
        "padded tail attended",
        "last key of a padded document dropped",
    )
    fault = ""

    def forward(self, query, key, value, mask, *args, packed_seq_params=None, **named):
        thd = packed_seq_params is not None
        q, k, v = (x[:, None] if thd else x for x in (query, key, value))
        cp, rank = self.group.size(), self.group.rank()
        documents = _documents(packed_seq_params, len(q) * cp)
        spans = [(start, end) for start, _, end in documents]
        places = [_zigzag(spans, each, cp) for each in range(cp)]
        order = torch.cat(places).argsort()
        k, v = (torch.cat(all_gather(x.contiguous(), self.group))[order] for x in (k, v))
        if cp == 1:
            k, v = key.view_as(k), value.view_as(v)
        allowed = self._allowed(documents, places[rank], rank, cp)
        shared = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
        scores = torch.einsum("sbhd,nbhd->bhsn", q, k).float() * self.softmax_scale
        scores = scores.masked_fill(~(allowed | ~allowed.any(1, keepdim=True)), -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if self.softmax_offset is not None:
            total = torch.logaddexp(total, self.softmax_offset.float()[:, None, None])
        weight = (scores - total).exp().masked_fill(~allowed.any(1, keepdim=True), 0)
        out = torch.einsum("bhsn,nbhe->sbhe", weight.to(v.dtype), v)
        return out[:, 0].flatten(1) if thd else out.flatten(2)

    def _allowed(self, documents, mine, rank, cp):
        if self.fault == "positions of the wrong rank" and cp > 1 and rank:
            mine = _zigzag([(start, end) for start, _, end in documents], 0, cp)
        n = documents[-1][2]
        document = torch.full((n,), -1)
        for number, (start, end, padded) in enumerate(documents):
            end = padded if self.fault == "padded tail attended" else end
            document[start:end] = number
        keys = document.clone()
        if self.fault == "last key of a padded document dropped":
            for _, end, padded in documents:
                keys[end - (end < padded) : end] = -1
        query, key = mine[:, None], torch.arange(n)
        allowed = (document[query] >= 0) & (document[query] == keys[key]) & (key <= query)
        if self.window:
            allowed &= query - key <= self.window[0]
        return allowed


def faulty(fault):
    """The class with this fault."""
    return type("FaultyRing", (StandInRing,), {"fault": fault})
