"""Bytes and time of the two ways in which ranks share a sequence of a recurrent layer: exchange of
heads, and states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cp_ring.plan.sizes.device_rates import Rates, running

_SCANS = 4
"""How much slower scans are than matrix products of as many FLOP: assumed, not measured."""


@dataclass(frozen=True)
class MixerSizes:
    """The sizes of a recurrent layer on a tensor-parallel rank.

    heads: heads with a state [k, v] each; k is 1 where a state decays by one number.
    channels: what an exchange of heads moves for each token, into the scan and out of it.
    element: bytes of a channel; states have 4.
    units: what ranks that exchange heads share: groups of Mamba's heads, or key heads.
    """

    heads: int
    k: int
    v: int
    channels: int
    element: int = 2
    units: int = 1

    def of_rank(self, tp: int) -> MixerSizes:
        """Return the sizes on one of `tp` tensor-parallel ranks."""
        heads, channels, units = self.heads // tp, self.channels // tp, self.units // tp
        return replace(self, heads=heads, channels=channels, units=units)

    @property
    def map_bytes(self) -> int:
        """Bytes of the map of a piece."""
        return self.heads * self.k * (self.v + self.k) * 4

    def exchange_bytes(self, tokens: int, cp: int) -> int:
        """Bytes that a rank of `tokens` tokens sends when heads are exchanged, in forward."""
        return tokens * self.channels * self.element * (cp - 1) // cp

    def scan_seconds(self, tokens: int, rates: Rates) -> float:
        """Return the predicted seconds of forward's scan over `tokens` tokens."""
        return 4 * tokens * self.heads * self.k * (self.v + self.k) * _SCANS / rates.products

    def seconds(self, tokens: int, cp: int, node: int) -> tuple[float, float]:
        """Return the predicted seconds, beside the scan itself, in forward and backward: with
        heads, and with states in the zigzag layout. `node` ranks share a node.
        """
        rates = running()
        rate = rates.inside if cp <= node else rates.between
        rounds = (2 * cp - 2).bit_length() + 1
        heads = self.exchange_bytes(tokens, cp) / rate + 2 * rates.call
        states = 2 * rounds * self.map_bytes / rate + rounds * (rates.start + rates.call)
        return 2 * heads, 2 * states + 3 * self.scan_seconds(tokens, rates)
