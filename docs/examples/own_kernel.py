"""A kernel of your own in plain torch, checked and selected by its name. Run it in a checkout:
PYTHONPATH=. python docs/examples/own_kernel.py
"""

import torch

from cp_ring import ring_attention
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.base import Capabilities
from tests import conformance


class PlainTorch:
    """One tile in, (out, lse) out. q [b, q, h, d], k [b, k, g, d], v [b, k, g, e], out [b, q, h,
    e], lse [b, h, q].
    """

    name = "plain_torch"
    # no bands: cp_ring hands over full and causal tiles alone
    capabilities = Capabilities(deterministic=True)

    def rejection(self, device, dtype, d, e):
        """Why such tensors cannot be computed; None where they can."""
        return (
            None
            if dtype in (torch.float32, torch.float64)
            else f"computes in float32 and float64, not {dtype}"
        )

    def forward(self, q, k, v, *, lo, hi, scale):
        scores, v = self._scores(q, k, hi, scale), self._heads(v, q)
        return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)

    def backward(self, dout, q, k, v, out, lse, *, lo, hi, scale):
        """`out` and `lse` are of the whole sequence, all tiles merged: so p and the gradients are
        this tile's exact share.
        """
        p = (self._scores(q, k, hi, scale) - lse[..., None]).exp()
        dout, out = dout.transpose(1, 2), out.transpose(1, 2)
        ds = p * (dout @ self._heads(v, q).mT - (dout * out).sum(-1, keepdim=True)) * scale
        dq, dk, dv = ds @ self._heads(k, q), ds.mT @ q.transpose(1, 2), p.mT @ dout
        # query heads that share a key/value head
        dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _heads(self, x, q):
        return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)

    def _scores(self, q, k, hi, scale):
        scores = q.transpose(1, 2) @ self._heads(k, q).mT * scale
        # hi 0: causal
        return (
            scores
            if hi
            else scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        )


KERNEL = PlainTorch()
# the module that holds KERNEL; now kernel="plain_torch" and --cp-ring-kernel name it
REGISTRY["plain_torch"] = __name__


def main():
    # all that a kernel promises, against autograd in float64; raises with the tile that is wrong
    conformance.check(KERNEL)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 100, heads, 16) for heads in (4, 2, 2))
    mine, stock = (
        ring_attention(q, k, v, causal=True, window_size=(30, 0), kernel=name)
        for name in ("plain_torch", "cpu")
    )
    torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
