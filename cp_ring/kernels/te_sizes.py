"""Keeps the sizes of TransformerEngine's packed calls few.

It builds a cuDNN graph, in a tenth of a second or more, for each number of tiles and
for each class of numbers of queries and of keys. A class ends at a power of two, and above
`_LARGEST` at a multiple of it. Each microbatch of packed documents has other numbers. So calls get
extra tokens, which belong to no tile, and extra tiles, which are empty. A size is a number of
tokens at which a class ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.kernels.base import Room
from cp_ring.plan.lower import BLOCK
from cp_ring.plan.tiles import Tiles

_SMALLEST, _LARGEST = 1024, 32768
_FEWEST_TILES = 16


@dataclass(frozen=True)
class FewSizes:
    """The `Sizes` of a rank with `shard` tokens. If its mask is `packed`, all its tiles are, else
    those of sizes that are not multiples of a block.
    """

    shard: int
    packed: bool

    def packs(self, tiles: Tiles) -> NDArray[np.bool_]:
        q, k = tiles.q1 - tiles.q0, tiles.k1 - tiles.k0
        return (q % BLOCK != 0) | (k % BLOCK != 0) | self.packed

    def rooms(self, queries: int, keys: int, sequences: int) -> tuple[Room, Room]:
        of_q, of_k = sizes_of(queries, keys, self.shard)
        tiles = tiles_of(sequences)
        return Room(tokens_of(of_q), of_q, tiles), Room(tokens_of(of_k), of_k, tiles)


def sizes_of(queries: int, keys: int, shard: int) -> tuple[int, int]:
    """Return the sizes of a call with so many queries and keys, on a rank with `shard` tokens.

    A size is the least power of two that is at least `shard`, or a quarter of it. More keys than
    that are rare: their size is that of their class, and the queries then have the larger of their
    two sizes.
    """
    whole = max(1 << (shard - 1).bit_length(), _SMALLEST)
    quarter = max(whole // 4, _SMALLEST)
    if keys > whole:
        return whole, min(1 << (keys - 1).bit_length(), -(-keys // _LARGEST) * _LARGEST)
    size_q, size_k = (quarter if tokens <= quarter else whole for tokens in (queries, keys))
    return size_q, size_k


def tokens_of(size: int) -> int:
    """Return the least number of tokens in the class of this size."""
    if size <= _SMALLEST:
        return 0
    return (size // 2 if size <= _LARGEST else size - _LARGEST) + 1


def tiles_of(count: int) -> int:
    """Return the number of tiles, 16, 32, 64, ..., to which empty tiles fill a call of `count`
    tiles: more than half of more than 16 have work.
    """
    return max(_FEWEST_TILES, 1 << (count - 1).bit_length())
