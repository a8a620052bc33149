"""Dense masks: pieces from arrays, and from functions of FlexAttention.

`Mask.from_dense` and `Mask.from_mask_mod` load this when they are called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cp_ring.errors import ConfigError, PlanError, one_line
from cp_ring.plan.ranges import Ints, integer, runs, sort_index, stream_length
from cp_ring.plan.tiles import OPEN, Tiles

if TYPE_CHECKING:
    from torch import Tensor

_LONG_S = 10.0  # seconds after which a function of a mask says how long it will take
_log = logging.getLogger(__name__)


def of_array(allowed: Any, max_pieces: int) -> tuple[int, Tiles]:
    """Return the tokens and the pieces of a boolean array or tensor; see `Mask.from_dense`."""
    allowed = _booleans(allowed)
    if allowed.ndim != 2 or allowed.shape[0] != allowed.shape[1]:
        raise PlanError(
            f"a dense mask of shape {list(allowed.shape)}: it must be [n, n], queries by keys"
        )
    n = stream_length(len(allowed))
    block = _queries_at_once(n)
    blocks = (allowed[first : first + block] for first in range(0, n, block))
    return n, _pieces_of(blocks, n, max_pieces)


def of_function(mask_mod: Callable[..., Any], n: int, max_pieces: int, device: str) -> Tiles:
    """Return the pieces of a function over `n` tokens; see `Mask.from_mask_mod`."""
    import torch

    if not callable(mask_mod):
        hint = ": give its mask_mod" * hasattr(mask_mod, "mask_mod")
        raise ConfigError(f"mask_mod is a {type(mask_mod).__name__}, not a function{hint}")
    none = _NoValue(torch.zeros((), dtype=torch.int64, device=device))

    def dense(first: int, count: int) -> np.ndarray:
        # not at the top: it imports torch's compiler
        from torch.nn.attention.flex_attention import create_mask

        def of_pair(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.as_tensor(mask_mod(none, none, query + first, key))

        try:
            allowed = create_mask(of_pair, None, None, count, n, device)
        except Exception as error:
            raise ConfigError(
                f"mask_mod failed with {type(error).__name__}: {one_line(error)}; it gets one "
                "query and one key at a time, as in FlexAttention, and b and h have no value, "
                "because all heads have one mask: where it needs them, give lambda b, h, q, k: "
                "mask_mod(0 * q, 0 * q, q, k)"
            ) from error
        if allowed.dim() != 4:
            raise PlanError(
                f"mask_mod gives a tensor of shape {list(allowed.shape[4:])} for a query and a "
                "key: it must be one boolean"
            )
        return _booleans(allowed[0, 0])

    def all_blocks() -> Iterator[np.ndarray]:
        most, begun = _queries_at_once(n), time.monotonic()
        for first in range(0, n, most):
            yield dense(first, min(most, n - first))
            seconds = (time.monotonic() - begun) * n / (first + most)
            if first == most and seconds > _LONG_S:
                _log.warning(
                    "from_mask_mod asks for all %.2g pairs of %d tokens, in about %.0f s on %s; "
                    "Mask.from_pieces takes none, and device='cuda' less",
                    n * n,
                    n,
                    seconds,
                    device,
                )

    return _pieces_of(all_blocks(), n, max_pieces)


class _NoValue:
    """Stands in for an argument on which a function must not depend. It makes constants, because
    torch's `and_masks` needs that.
    """

    def __init__(self, like: Tensor):
        self.device, self.dtype = like.device, like.dtype
        self.new_ones, self.new_zeros = like.new_ones, like.new_zeros
        self.new_full, self.new_tensor = like.new_full, like.new_tensor

    def __eq__(self, _: object) -> bool:
        raise TypeError("it depends on b or h")


def _booleans(values: Any) -> np.ndarray:
    """Return an array of booleans from an array, or a tensor on any device. Raises `PlanError` for
    other dtypes.
    """
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.dtype != bool:
        raise PlanError(
            f"a dense mask must be boolean, True where a query sees a key, not {array.dtype}"
        )
    return array


def _queries_at_once(n: int) -> int:
    """Return how many queries make about 16 million pairs of a dense mask."""
    return max(1, (1 << 24) // n)


def _pieces_of(blocks: Iterable[np.ndarray], n: int, most: int) -> Tiles:
    """Return the pieces of a dense mask, given as `blocks` [queries, n], one after another.

    A run of keys continues at the next query if each of its ends stays or moves on by one key. A
    hidden key lies between two runs, so a run continues in at most one other. A piece is a chain of
    such runs up to the query at which a band can no longer follow: a band's first key stays before
    it moves, and its last key moves before it stays.
    """
    parts, first = [], 0
    for allowed in blocks:
        edges = np.diff(np.pad(allowed, ((0, 0), (1, 1))).view(np.int8), axis=1)
        query, start = np.nonzero(edges == 1)
        parts.append(np.stack([query + first, start, np.nonzero(edges == -1)[1]]))
        first += len(allowed)
    table, most = np.concatenate(parts, axis=1), integer(most, "max_pieces")
    query, start, _ = table
    place = query * (n + 1) + start
    before = np.maximum(np.searchsorted(place, place - (n + 1), side="right") - 1, 0)
    moved = table - table[:, before]
    goes_on = (moved[0] == 1) & ((moved[1:] >> 1) == 0).all(0)
    chain = np.where(goes_on, before, np.arange(len(place)))
    while not np.array_equal(chain, further := chain[chain]):
        chain = further
    order = np.argsort(chain, kind="stable")
    query, start, end = table[:, order]
    late, early = np.diff(start), np.diff(end)
    breaks = np.diff(chain[order]) != 0
    bent = (late[1:] < late[:-1]) | (early[1:] > early[:-1])
    breaks[_every_other(np.flatnonzero(bent & ~breaks[1:] & ~breaks[:-1]) + 1)] = True
    one, last = runs(breaks, len(query))
    if len(one) > most:
        raise ConfigError(
            f"the mask of {n} tokens has {len(one)} pieces, more than max_pieces={most}: each is "
            "computed and merged by itself, which is slow; give a mask whose queries see longer "
            "runs of keys, or raise max_pieces"
        )
    q0, k0, k1 = query[one], start[one], end[last]
    lo = np.where(start[last] > k0, start[last] - query[last], -OPEN)
    hi = np.where(end[one] < k1, end[one] - 1 - q0, OPEN)
    pieces = Tiles.columns(q0, query[last] + 1, k0, k1, lo, hi).trimmed()
    return pieces[sort_index(pieces.q0, pieces.k0)]


def _every_other(places: Ints) -> Ints:
    """Return the first, third, ... of each chain of consecutive numbers among the ascending
    `places`.
    """
    chain, end = runs(np.diff(places) != 1, len(places))
    return places[(np.arange(len(places)) - np.repeat(chain, end - chain + 1)) % 2 == 0]
