"""A recurrent layer of your own, whose ranks pass states: the recurrence of RWKV-7
(https://arxiv.org/abs/2503.14456), token by token. Run: python docs/examples/own_recurrence.py
"""

import numpy as np
import torch
import torch.nn.functional as F

from cp_ring import Layout, shard
from cp_ring.comm.states import StatePassing
from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.exchange.verify_chains import verify_chains
from cp_ring.testing.local_ring import LocalRing

HEADS, K, V = 2, 4, 4


def scan(r, w, a, b, k, v, states, cu_seqlens):
    """Outputs [T, h, v], and the states after each document, from those before them [documents, h,
    k, v]: S = (diag(w) + a b^T) S + k v^T, out = r S. All inputs are [T, h, channels].
    """
    outs, ends = [], []
    for state, start, end in zip(states, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        for t in range(start, end):
            seen = torch.einsum("hk,hkv->hv", b[t], state)
            state = w[t, ..., None] * state + a[t, ..., None] * seen[:, None]
            state = state + k[t, ..., None] * v[t, :, None]
            outs.append(torch.einsum("hk,hkv->hv", r[t], state))
        ends.append(state)
    return torch.stack(outs), torch.stack(ends)


def maps(*tensors):
    """[B, A] of each segment: values [v, 0] from the state [0, I]."""
    r, w, a, b, k, v, cu_seqlens = tensors
    first = F.pad(torch.eye(K), (V, 0)).expand(len(cu_seqlens) - 1, HEADS, K, V + K)
    return scan(r, w, a, b, k, F.pad(v, (0, K)), first, cu_seqlens)[1]


def apply(*tensors):
    return scan(*tensors)[0]


def main(cp=4):
    n, documents = 64, np.array([0, 23, 50])
    layout = Layout.zigzag(n, cp)
    chains = Chains.build(layout, documents)
    verify_chains(chains, width=1)  # no convolution

    torch.manual_seed(0)
    r, w, a, b, k, v = (torch.randn(n, HEADS, K) for _ in range(6))
    b = F.normalize(b, dim=-1)
    inputs = r, w.sigmoid(), -b * a.sigmoid(), b, k, v

    def layer(group):
        mine = [x.clone().requires_grad_() for x in shard(inputs, layout, group, dim=0)]
        passing = StatePassing(chains, group, torch.device("cpu"))
        out = passing.affine(maps, apply, *mine, state=(HEADS, K, V))
        return out.detach(), *torch.autograd.grad(out.sin().sum(), mine)

    ranks = LocalRing(cp).run(layer)
    whole = [x.clone().requires_grad_() for x in inputs]
    out = apply(*whole, torch.zeros(3, HEADS, K, V), [*documents, n])
    expected = out.detach(), *torch.autograd.grad(out.sin().sum(), whole)
    for parts, wanted in zip(zip(*ranks, strict=True), expected, strict=True):
        torch.testing.assert_close(layout.unshard(list(parts), dim=0), wanted)


if __name__ == "__main__":
    main()
