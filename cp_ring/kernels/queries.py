"""Cuts the tensors of queries for the kernel calls of a pass, in the layout that kernels need, once
for consecutive calls with the same queries.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor


class Queries:
    """Tensors of all queries of a pass, [b, s, h, size]: q, in backward dout, q and the merged out,
    with lse [b, h, s]. Consecutive calls with the same queries share their views, and one
    contiguous copy of lse.
    """

    def __init__(self, *tensors: Tensor, lse: Tensor | None = None):
        self.tensors, self.lse = tensors, lse
        self._tokens: slice | None = None
        self._part: list[Tensor] = []

    @cached_property
    def flat(self) -> list[Tensor]:
        """The tensors as packed calls read them, [s, b * h, size]: batch rows become heads."""
        return [x.transpose(0, 1).flatten(1, 2) for x in self.tensors]

    def part(self, tokens: slice) -> list[Tensor]:
        """Return the tensors of these queries, [b, tokens, h, size], and their lse [b, h,
        tokens].
        """
        if self._tokens != tokens:
            whole = tokens.stop - tokens.start == self.tensors[0].shape[1]
            self._part = [x if whole else x[:, tokens] for x in self.tensors]
            if self.lse is not None:
                lse = self.lse if whole else self.lse[..., tokens]
                self._part.append(lse.contiguous())
            self._tokens = tokens
        return self._part
