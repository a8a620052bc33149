"""Bytes and time of the two ways in which ranks share a sequence of a recurrent layer: exchange of
heads, and states.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_ring.plan.sizes.device_rates import RATES

_SCANS = 4
"""How much slower scans are than matrix products of as many FLOP: assumed, not measured."""


@dataclass(frozen=True)
class MixerSizes:
    """The sizes of a recurrent layer on a tensor-parallel rank.

    heads: heads with a state [k, v] each; k is 1 where a state decays by one number.
    channels: what an exchange of heads moves for each token, into the scan and out of it.
    element: bytes of a channel; states have 4.
    """

    heads: int
    k: int
    v: int
    channels: int
    element: int = 2

    @property
    def map_bytes(self) -> int:
        """Bytes of the map of a piece."""
        return self.heads * self.k * (self.v + self.k) * 4

    def exchange_bytes(self, tokens: int, cp: int) -> int:
        """Bytes that a rank of `tokens` tokens sends when heads are exchanged, in forward."""
        return tokens * self.channels * self.element * (cp - 1) // cp

    def seconds(self, tokens: int, cp: int, node: int) -> tuple[float, float]:
        """Return the predicted seconds, beside the scan itself, in forward and backward: with
        heads, and with states in the zigzag layout. `node` ranks share a node.
        """
        rate = RATES.inside if cp <= node else RATES.between
        rounds = (2 * cp - 2).bit_length() + 1
        heads = self.exchange_bytes(tokens, cp) / rate + 2 * RATES.call
        states = 2 * rounds * self.map_bytes / rate + rounds * (RATES.start + RATES.call)
        again = 3 * 4 * tokens * self.heads * self.k * (self.v + self.k) * _SCANS
        return 2 * heads, 2 * states + again / RATES.products
