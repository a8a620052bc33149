"""Head parallelism, the second axis of context parallelism, around the ring: the heads that each
rank computes.

`ulysses` neighboring ranks form a member of the ring. They exchange tokens for heads (an
all-to-all): each then holds the tokens of the whole member, but only its part of the heads. The
ring runs over the members, once for each part of the heads; the outputs go back the same way. With
`ulysses=1` every rank is its own member, and the ring is alone; with `ulysses=cp` all ranks are one
member, and there is no ring.

Sources: DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509; both axes at once, Fang
and Zhao, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import integer
from cp_ring.runtime import RUNTIME

Span = tuple[int, int]

MAX_GROUPS = 3
"""The most groups of a rank's heads. The exchange of one group travels while another is
computed.
"""


@dataclass(frozen=True)
class HeadSplit:
    """The heads that each rank of a member computes, by group and by the rank's place in the
    member.

    queries: query heads `[start, end)`.
    keys: key/value heads `[start, end)` that these query heads use.
    """

    heads: int
    kv_heads: int
    size: int
    queries: tuple[tuple[Span, ...], ...]
    keys: tuple[tuple[Span, ...], ...]

    @property
    def groups(self) -> int:
        return len(self.queries)

    @property
    def sharing(self) -> int:
        """The number of neighboring ranks that have the same key/value head; 1 if each rank has its
        own.
        """
        return max(self.size // self.kv_heads, 1)

    @property
    def kv_heads_of_rank(self) -> int:
        """The number of key/value heads that a rank computes with, in all its groups."""
        return max(self.kv_heads // self.size, 1)


def unsplit(heads: int, kv_heads: int, size: int) -> str:
    """Return why `size` ranks cannot exchange these heads, or "" if they can: TransformerEngine's
    rule.

    Each rank computes equally many query heads, with key/value heads of its own, or with one that
    it shares with neighbors.
    """
    if integer(size, "heads") < 1 or heads % size:
        return f"heads={size}: it must divide the {heads} query heads"
    if kv_heads % size and size % kv_heads:
        return (
            f"heads={size}: it must divide the {kv_heads} key/value heads, or be a multiple of them"
        )
    return ""


@RUNTIME.cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, size: int) -> HeadSplit:
    """Return the proven split (`check_heads`) of `heads` query heads and `kv_heads` key/value heads
    over the `size` ranks that act as one rank of the ring.

        split = split_heads(heads=32, kv_heads=8, size=4)

    A rank with several key/value heads computes them in 2 or 3 groups of equal size, a kernel call
    each, where their number divides; otherwise in one group.

    Raises `PlanError` with the reason why the heads cannot be split (`unsplit`).
    """
    if reason := unsplit(heads, kv_heads, size):
        raise PlanError(reason)
    own_keys = max(kv_heads // size, 1)
    groups = next((count for count in range(2, MAX_GROUPS + 1) if own_keys % count == 0), 1)
    width = heads // size // groups
    starts = [range(group * width, heads, heads // size) for group in range(groups)]
    queries = tuple(tuple((start, start + width) for start in each) for each in starts)
    first = [[start * kv_heads // heads for start in each] for each in starts]
    keys = tuple(tuple((key, key + own_keys // groups) for key in each) for each in first)
    split = HeadSplit(heads, kv_heads, size, queries, keys)
    check_heads(split)
    return split


def check_heads(split: HeadSplit) -> None:
    """Raise `PlanError` unless each query head is computed by one rank in one group, with its own
    key/value head.

    In a kernel call, query head i of H uses key/value head i // (H / G) of G. So for every query
    head of a rank, this head, counted from the start of `keys`, must be the one that the query head
    has in the whole layer.
    """
    shared, done = split.heads // split.kv_heads, np.zeros(split.heads, np.int64)
    for group, spans in enumerate(zip(split.queries, split.keys, strict=True)):
        for place, ((start, end), (first, last)) in enumerate(zip(*spans, strict=True)):
            where = f"rank {place} of a member, group {group}"
            if last <= first or (end - start) % (last - first):
                raise PlanError(
                    f"{where}: {last - first} key/value heads do not divide {end - start} query "
                    "heads"
                )
            done[start:end] += 1
            for head in range(start, end):
                used = first + (head - start) // ((end - start) // (last - first))
                if used != head // shared:
                    raise PlanError(
                        f"{where}: query head {head} uses key/value head {used}, not "
                        f"{head // shared}"
                    )
    for head in np.flatnonzero(done != 1).tolist():
        raise PlanError(f"query head {head} is computed {done[head]} times")
