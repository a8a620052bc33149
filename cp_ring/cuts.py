"""Notes how the sequences of a group were cut. Attention on parts of another layout gives wrong
numbers, and the parts themselves do not show it.

`shard` notes its layouts here, and calls that name a layout, or leave it to the default, check
them. Calls with a `Layout` or a plan of their own do not.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from cp_ring.errors import ConfigError
from cp_ring.plan.layout import Layout
from cp_ring.runtime import RUNTIME

_MANY = 64  # layouts of one length, or lengths: there, a layout follows from each microbatch

Cuts = defaultdict[int, dict[str, str]]  # by length: the digest of each layout, and its words

_cuts: MutableMapping[Any, Cuts] = RUNTIME.keep(WeakKeyDictionary())


def _key(transport: Any) -> Any:
    return getattr(transport, "group", transport)  # a group has a transport for each device type


def note_cut(transport: Any, layout: Layout) -> None:
    """Note that a whole tensor of the ranks of a transport was cut by this layout."""
    cuts = _cuts.setdefault(_key(transport), defaultdict(dict))
    if len(cuts) < _MANY or layout.n in cuts:
        cuts[layout.n][layout.digest] = repr(layout)


def check_cut(transport: Any, layout: Layout, call: str, named: bool) -> None:
    """Compare the layout of a call with those by which `shard` cut sequences of this length. If
    none of them is the same, raise `ConfigError` if the call left its layout to the default, and
    warn if it named one: its parts may not come from `shard`.
    """
    cuts = _cuts.get(_key(transport))
    of_length = cuts.get(layout.n) if cuts else None
    if of_length and layout.digest not in of_length and len(of_length) < _MANY:
        line = (
            f"cp_ring.shard cut the {layout.n} tokens by {' and '.join(of_length.values())}, but "
            f"{call} has {layout!r}: give both the same layout="
        )
        if not named:
            raise ConfigError(line)
        warnings.warn(line, stacklevel=2)


def check_slices(tensors: tuple[Tensor, ...], dim: int, layout: Layout, rank: int) -> None:
    """Raise `ConfigError` if q, k and v are contiguous slices of whole tensors for this rank, and
    the layout gives the rank other tokens.
    """
    for x in tensors:
        base = x._base
        if base is None or base.dim() != x.dim() or base.stride() != x.stride():
            return
        whole = [*x.shape[:dim], layout.n, *x.shape[dim + 1 :]]
        first = x.storage_offset() - base.storage_offset()
        if [*base.shape] != whole or first != rank * x.shape[dim] * x.stride(dim):
            return
    start, end = rank * tensors[0].shape[dim], (rank + 1) * tensors[0].shape[dim]
    if layout.rows > 1 or layout.ranges(rank) == [(start, end)]:
        return
    raise ConfigError(
        f"q, k and v are tokens {start} to {end} of whole tensors, which are not those that rank "
        f"{rank} holds in {layout!r}: cut them by cp_ring.shard(x, group=group), or give "
        "layout='contiguous'"
    )
