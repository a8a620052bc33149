"""Keeps the sizes of packed calls few, for libraries that build a graph for each size.

TransformerEngine builds a cuDNN graph, in a tenth of a second or more, for each number of tiles and
for each class of numbers of queries and of keys. A class ends at a power of two, and above
`_LARGEST` at a multiple of it. Each microbatch of packed documents has other numbers. So calls get
extra tokens, which belong to no tile, and extra tiles, which are empty. A size is a number of
tokens at which a class ends.
"""

from __future__ import annotations

_SMALLEST, _LARGEST = 1024, 32768
_FEWEST_TILES, _FACTOR = 16, 4


def sizes_of(queries: int, keys: int, shard: int) -> tuple[int, int]:
    """Return the sizes of a call with so many queries and keys, on a rank with `shard` tokens.

    A size is the least power of two that is at least `shard`, or a quarter of it. More keys than
    that are rare: their size is that of their class, and the queries then have the larger of their
    two sizes.
    """
    whole = max(1 << (shard - 1).bit_length(), _SMALLEST)
    quarter = max(whole // _FACTOR, _SMALLEST)
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
    """Return the number of tiles, with empty ones, of a call that has `count`: 16, 64, 256, ..."""
    rounded = _FEWEST_TILES
    while rounded < count:
        rounded *= _FACTOR
    return rounded
