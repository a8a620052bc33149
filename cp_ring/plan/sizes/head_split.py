"""Which rank of a member computes which heads; see `cp_ring.plan.exchange.members`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import integer
from cp_ring.runtime import RUNTIME

Span = tuple[int, int]

MAX_GROUPS = 3
"""The exchange of one group of a rank's heads travels while another group is computed: at most so
many groups.
"""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a member computes, in which group: indexed by group and by the
    rank's place in the member.

    queries: query heads `[start, end)`.
    keys: key/value heads `[start, end)` that these query heads use; heads of several ranks may
    overlap.
    repeated: for each key/value head that the kernel gets, which of `keys` it is, counted from
        their start. Kernels share each key/value head among equally many query heads, so where a
        rank's query heads use some heads more than others, these are repeated.
    """

    heads: int
    kv_heads: int
    size: int
    queries: tuple[tuple[Span, ...], ...]
    keys: tuple[tuple[Span, ...], ...]
    repeated: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def groups(self) -> int:
        return len(self.queries)

    @property
    def even(self) -> bool:
        """Whether every key/value head goes to one rank, so that ranks together hold no more keys
        than before.
        """
        return self.kv_heads % self.size == 0

    @property
    def kv_heads_of_rank(self) -> int:
        """Key/value heads that a rank computes with, in all its groups, repeated ones included; on
        the rank with most.
        """
        return max(sum(len(group[place]) for group in self.repeated) for place in range(self.size))


@RUNTIME.cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, size: int) -> HeadSplit:
    """`heads` query heads and `kv_heads` key/value heads over the `size` ranks of a member, proven
    (`check_heads`).

    A rank with several key/value heads of its own gets them in 2 or 3 groups, if these are equal.
    Ranks that share key/value heads get one group: several would send the same keys around the ring
    again.

    Raises `PlanError` if `size` does not divide the query heads.
    """
    if integer(size, "heads") < 1 or heads % size:
        raise PlanError(f"heads={size}: it must divide the {heads} query heads")
    mine, shared = heads // size, heads // kv_heads
    own_keys = kv_heads // size if kv_heads % size == 0 else 1
    groups = next((count for count in range(2, MAX_GROUPS + 1) if own_keys % count == 0), 1)
    width = mine // groups
    # Query heads that have one key/value head in common everywhere: the kernel's key/value heads
    # are for so many each.
    block = gcd(width, shared)
    queries, keys, repeated = [], [], []
    for group in range(groups):
        first = [place * mine + group * width for place in range(size)]
        used = [
            [(start + offset) // shared for offset in range(0, width, block)] for start in first
        ]
        queries.append(tuple((start, start + width) for start in first))
        keys.append(tuple((each[0], each[-1] + 1) for each in used))
        repeated.append(tuple(_fewest([head - each[0] for head in each]) for each in used))
    split = HeadSplit(heads, kv_heads, size, tuple(queries), tuple(keys), tuple(repeated))
    check_heads(split)
    return split


def _fewest(used: list[int]) -> tuple[int, ...]:
    """The heads in `used`, one for each block of query heads, with as few repetitions as equal
    shares allow.
    """
    runs = [used.count(head) for head in dict.fromkeys(used)]
    step = gcd(*runs)
    return tuple(used[::step])


def check_heads(split: HeadSplit) -> None:
    """Each query head is computed by one rank in one group, with its own key/value head. Raises
    `PlanError` if not.

    In a kernel call, query head i of H uses key/value head i // (H / G) of G. So for every query
    head of a rank, this head, looked up in `repeated` and counted from the start of `keys`, must be
    the one that the query head has in the whole layer.
    """
    shared, done = split.heads // split.kv_heads, [0] * split.heads
    for group in range(split.groups):
        for place in range(split.size):
            (start, end), (first, last) = split.queries[group][place], split.keys[group][place]
            local = split.repeated[group][place]
            where = f"rank {place} of a member, group {group}"
            if (end - start) % len(local):
                raise PlanError(
                    f"{where}: {len(local)} key/value heads do not divide {end - start} query heads"
                )
            for head in range(start, end):
                used = first + local[(head - start) // ((end - start) // len(local))]
                if used != head // shared or not first <= used < last:
                    raise PlanError(
                        f"{where}: query head {head} uses key/value head {used}, not "
                        f"{head // shared}"
                    )
                done[head] += 1
    for head, times in enumerate(done):
        if times != 1:
            raise PlanError(f"query head {head} is computed {times} times")
