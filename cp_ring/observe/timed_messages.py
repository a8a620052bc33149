"""The messages of a sampled step, of which each has a time when both of its ends have posted it and
one when its receiver has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cp_ring.observe.timing import CallTimes, PostTime, WaitTime

MASKED = 2e-5
"""Seconds of waiting that are taken for none."""


@dataclass(frozen=True)
class RankTimes:
    """The times of one rank in a sampled step. `clock` seconds on its host are 0 on that of the
    group's first rank.
    """

    rank: int
    host: str
    calls: Sequence[CallTimes]
    plan_seconds: float = 0.0
    clock: float = 0.0


class TimedMessage(NamedTuple):
    """The messages of one batch from a rank to another; times in seconds of the clock of the
    group's first rank.

    `start`: both have posted it. `end`: the receiver has it. `waited`: how long the receiver waited
    for it. `known`: the receiver
    did not wait for another message first, while this one may have arrived.
    """

    kind: str
    hop: int
    direction: str
    sender: int
    receiver: int
    size: int
    sent: float
    start: float
    end: float
    waited: float
    known: bool

    @property
    def seconds(self) -> float:
        """From the moment at which both ends have posted it."""
        return self.end - self.start

    @property
    def exposed(self) -> bool:
        """Whether the receiver waited long enough for it to know when it arrived."""
        return self.waited > max(MASKED, 0.02 * self.seconds)


def messages(ranks: Sequence[RankTimes]) -> Iterator[TimedMessage]:
    """The messages between these ranks. Both ends of a link post its messages in the same order."""
    sends: defaultdict[tuple[int, int], list[tuple[PostTime, int, float]]] = defaultdict(list)
    receives: defaultdict[
        tuple[int, int], list[tuple[PostTime, int, float, str, WaitTime | None]]
    ] = defaultdict(list)
    clocks = {each.rank: each.clock for each in ranks}
    for each in ranks:
        posts = [
            (post.at, index, post, call)
            for index, call in enumerate(each.calls)
            for post in call.posts
        ]
        awaited = {id(post): wait for call in each.calls for post, wait in _pairs(call)}
        for at, _, post, call in sorted(posts, key=lambda entry: entry[:2]):
            for peer, size in post.sends:
                sends[each.rank, peer].append((post, size, at - each.clock))
            for peer, size in post.receives:
                receives[peer, each.rank].append(
                    (post, size, at - each.clock, call.direction, awaited.get(id(post)))
                )
    for (sender, receiver), leaving in sends.items():
        for (post, size, sent), (_, _, expected, direction, wait) in zip(
            leaving, receives[sender, receiver], strict=False
        ):
            if wait is not None:
                end, waited, before = _arrival(wait, sender)
                start, end = max(sent, expected), end - clocks[receiver]
                yield TimedMessage(
                    post.kind,
                    post.hop,
                    direction,
                    sender,
                    receiver,
                    size,
                    sent,
                    start,
                    max(end, start),
                    waited,
                    before < MASKED,
                )


def _pairs(call: CallTimes) -> Iterator[tuple[PostTime, WaitTime]]:
    """The messages of a call with the wait for them. Those of the exchange of heads are waited for
    in their order.
    """
    if call.direction == "exchange":
        yield from zip(call.posts, call.waits, strict=False)
        return
    waits = {
        (wait.kind, wait.hop): wait for wait in call.waits if wait.hop or wait.kind == "gradients"
    }
    for post in call.posts:
        if (wait := waits.get((post.kind, post.hop))) is not None and post.receives:
            yield post, wait


def _arrival(wait: WaitTime, sender: int) -> tuple[float, float, float]:
    """When the last message of the sender was there, how long it was waited for, and how long for
    others before it.
    """
    previous, waited, end, before = wait.begin, 0.0, wait.end, 0.0
    for peer, at in wait.arrivals:
        if peer == sender:
            waited, end, before = waited + at - previous, at, previous - wait.begin - waited
        previous = at
    return (end, waited, before) if wait.arrivals else (wait.end, wait.seconds, 0.0)
