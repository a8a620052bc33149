"""The parts of a gated delta net layer in torch, for any device: to try and to time what ranks
exchange where the package fla has no kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def causal_conv1d(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The causal convolution of each channel, then SiLU: x [1, T, d], weight [d, width]."""
    width = weight.shape[1]
    parts = x[0].split(cu_seqlens.diff().tolist())
    outs = [
        F.conv1d(F.pad(part.T[None], (width - 1, 0)), weight[:, None], groups=len(weight))[0].T
        for part in parts
    ]
    return F.silu(torch.cat(outs))[None]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **states: Any
) -> tuple[Tensor, Tensor]:
    """As `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, of documents in one batch row, in
    chunks of `CHUNK` tokens (https://arxiv.org/abs/2412.06464).

    q, k [1, T, h, d_k], v [1, T, h, d_v]; g and beta [1, T, h]; states [documents, h, d_k, d_v]:
    `initial_state` among `states`, and the last ones, which are returned whether asked for or not.
    """
    cuts = cu_seqlens.diff().tolist()
    documents = zip(*(x[0].split(cuts) for x in (q, k, v, g, beta)), strict=True)
    outs, ends = [], []
    for number, tensors in enumerate(documents):
        state = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1])
        if (initial := states.get("initial_state")) is not None:
            state = initial[number]
        out, end = _document(state, *tensors)
        outs.append(out)
        ends.append(end)
    return torch.cat(outs)[None], torch.stack(ends)


def _document(state: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one document. The keys of a chunk are made independent by a
    triangular system, whose right sides are what the chunk learns and what it takes from the state.
    """
    q, k, v, g, beta = tensors
    tokens, size = len(q), min(CHUNK, len(q))
    # [h, chunks, size, d]
    q, k, v, g, beta = (
        F.pad(x.reshape(tokens, x.shape[1], -1), (0, 0, 0, 0, 0, -tokens % size))
        .unflatten(0, (-1, size)).permute(2, 0, 1, 3)
        for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)
    )  # fmt: skip
    g = g.cumsum(2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (g - g.mT).masked_fill(later, -torch.inf).exp()
    mixed = (beta * (k @ k.mT) * decay).tril(-1)
    learned, taken = torch.linalg.solve_triangular(
        mixed, torch.cat([beta * v, beta * g.exp() * k], -1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], -1)
    within, ahead = (q @ k.mT) * decay, q * g.exp()
    kept, last = k * (g[:, :, -1:] - g).exp(), g[:, :, -1:].exp()
    outs = []
    for chunk in range(q.shape[1]):
        new = learned[:, chunk] - taken[:, chunk] @ state
        outs.append(ahead[:, chunk] @ state + within[:, chunk] @ new)
        state = last[:, chunk] * state + kept[:, chunk].mT @ new
    return torch.cat(outs, 1).transpose(0, 1)[:tokens], state
