"""Slices q, dout, out and lse for the kernel calls of a backward pass, in the layout that kernels
need, once for consecutive calls with the same queries.
"""

from __future__ import annotations

from torch import Tensor


class Queries:
    """All queries of a backward pass: dout [s, b, h, e], q, the merged out and lse [b, h, s].
    Consecutive calls with the same queries share their views, and one contiguous copy of lse.
    """

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor):
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self._tokens: slice | None = None
        self._part: tuple[Tensor, Tensor, Tensor, Tensor]

    def part(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return dout, q and out [b, tokens, ...] and lse [b, h, tokens] of these queries."""
        if self._tokens != tokens:
            dout, q, out = [x[tokens].transpose(0, 1) for x in (self.dout, self.q, self.out)]
            self._tokens = tokens
            self._part = dout, q, out, self.lse[..., tokens].contiguous()
        return self._part
