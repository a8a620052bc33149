"""Notes how the sequences of a group were cut, and warns of attention on parts of another layout:
it gives wrong numbers, and the parts themselves do not show it.

`shard` notes its layouts here, and Megatron's own split of batch rows its zigzag; calls that name a
layout, or leave it to the default, check them. Calls with a `Layout` or a plan of their own do not.
Other tensors of the same length may be cut in other ways, so it is no error.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

from cp_ring.plan.layout import Layout
from cp_ring.runtime import RUNTIME

_MANY = 64  # the layouts that are kept: those that were used last

_cuts: MutableMapping[Any, OrderedDict[str, Layout]] = RUNTIME.keep(WeakKeyDictionary())


def _cuts_of(transport: Any) -> OrderedDict[str, Layout]:
    """Return the layouts of a group, by digest; a group has a transport for each device type."""
    return _cuts.setdefault(getattr(transport, "group", transport), OrderedDict())


def note_cut(transport: Any, layout: Layout) -> None:
    """Note that a whole tensor of the ranks of a transport was cut by this layout."""
    cuts = _cuts_of(transport)
    cuts[layout.digest] = layout
    cuts.move_to_end(layout.digest)
    while len(cuts) > _MANY:
        cuts.popitem(last=False)


def check_cut(transport: Any, layout: Layout, call: str) -> None:
    """Warn if `shard` cut sequences of this length, but none by the layout of a call."""
    cuts = _cuts_of(transport)
    if layout.digest not in cuts:
        others = [repr(cut) for cut in cuts.values() if cut.n == layout.n]
        if others:
            warnings.warn(
                f"the {layout.n} tokens were cut by {' and '.join(others)}, but {call} has "
                f"{layout!r}: give cp_ring.shard and the call the same layout=; Megatron cuts by "
                "zigzag",
                stacklevel=2,
            )
