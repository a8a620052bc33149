"""What the times of a sampled step mean: exposed communication, speed of the wire, balance, the
slowest rank, the slowest link.

`group_findings` compares the ranks of one context-parallel group, which make the same calls. A rank
is slow by what it computes
itself: a clock of another rank plays no part, and neither does what it waits for. A link is slow by
the time between the moment
at which both ends have posted a message and the moment at which the receiver, who waits for it, has
it. So a rank that posts late is not taken for a slow link, nor a slow link for a slow rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from cp_ring.observe.links import BETWEEN, INSIDE, class_of
from cp_ring.observe.timing import CallTimes, PostTime, WaitTime

SLOW_RANK, NOTABLE = 1.10, 1.05
"""A rank this many times slower than the median of the others is slow."""
SLOW_LINK, LINK_MATTERS = 3.0, 0.05
"""A link is slow whose messages take this many times longer than on others of its class, and for
which at least this share of the receiver's attention time is waited. A link of a slow rank is not
to blame."""
MASKED = 2e-5
"""Seconds of waiting that are taken for none."""
SURE = 0.6
"""Share of the calls, or messages, in which it must have been so."""
SAMPLES = 3
"""Consecutive samples after which a slow rank or link is named."""


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


@dataclass(frozen=True)
class SlowRank:
    """`slower`: how many times more time than the median of the others; `share`: of the calls in
    which it took 5 % more.
    """

    rank: int
    host: str
    slower: float
    share: float


@dataclass(frozen=True)
class SlowLink:
    """`slower`: how many times more time than on other links of its class; `share`: of its messages
    that were waited for.

    `waited`: share of the receiver's attention time that it waits for them.
    """

    sender: int
    receiver: int
    hosts: tuple[str, str]
    slower: float
    share: float
    waited: float


@dataclass(frozen=True)
class Findings:
    """What a sampled step shows. Seconds are the mean of the ranks, unless said otherwise.

    Attributes:
        attention, exposed: seconds in attention calls, and those of them spent waiting.
        exposed_max: seconds of the rank that waits longest.
        hops: seconds by direction and hop: (direction, hop) to (computing, waiting).
        waits: seconds of waiting by link class.
        wire: bytes a second of a receiver by link class, and whether that is only a lower limit
        because nobody waited.
        balance_planned, balance_timed: the work of the busiest rank over the mean, in pairs and in
        seconds.
        plans: seconds that the rank that waited longest waited for plans of microbatches.
        clock_error: seconds by which times of different hosts may be off.
        possible: bytes a second of a link class that preflight measured, before training.
    """

    step: int
    ranks: int
    calls: int
    attention: float
    exposed: float
    exposed_max: float
    hops: dict[tuple[str, int], tuple[float, float]]
    waits: dict[str, float]
    wire: dict[str, tuple[float, bool]]
    balance_planned: float
    balance_timed: float
    plans: float
    slowest_rank: SlowRank | None
    slowest_link: SlowLink | None
    clock_error: float = 0.0
    possible: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON, for steps.jsonl: times in milliseconds, rates in GB/s."""
        return {
            "step": self.step,
            "calls": self.calls,
            "attention_ms": _ms(self.attention),
            "exposed_ms": _ms(self.exposed),
            "exposed_share": round(self.exposed_share, 4),
            "exposed_max_ms": _ms(self.exposed_max),
            "hops": [
                {
                    "direction": direction,
                    "hop": hop,
                    "compute_ms": _ms(compute),
                    "wait_ms": _ms(wait),
                }
                for (direction, hop), (compute, wait) in sorted(self.hops.items())
            ],
            "waits_ms": {name: _ms(seconds) for name, seconds in self.waits.items()},
            "wire_gb_s": {name: round(rate / 1e9, 3) for name, (rate, _) in self.wire.items()},
            "wire_possible_gb_s": {
                name: round(rate / 1e9, 3) for name, rate in self.possible.items()
            },
            "wire_at_least": [name for name, (_, at_least) in self.wire.items() if at_least],
            "balance_planned": round(self.balance_planned, 4),
            "balance_timed": round(self.balance_timed, 4),
            "plans_ms": _ms(self.plans),
            "slowest_rank": None if self.slowest_rank is None else asdict(self.slowest_rank),
            "slowest_link": None if self.slowest_link is None else asdict(self.slowest_link),
            "clock_error_ms": _ms(self.clock_error),
        }

    def scalars(self) -> dict[str, float]:
        """Numbers for TensorBoard, by name."""
        found = {
            "attention (ms)": self.attention * 1e3,
            "exposed communication (ms)": self.exposed * 1e3,
            "exposed communication (%)": self.exposed_share * 1e2,
            "balance, planned": self.balance_planned,
            "balance, timed": self.balance_timed,
            "waiting for plans (ms)": self.plans * 1e3,
        }
        found |= {f"wire {name} (GB per s)": rate / 1e9 for name, (rate, _) in self.wire.items()}
        if self.slowest_rank is not None:
            found["slowest rank"], found["slowest rank (times the median)"] = (
                self.slowest_rank.rank,
                self.slowest_rank.slower,
            )
        return found

    @property
    def exposed_share(self) -> float:
        """The share of attention time that is waiting."""
        return self.exposed / self.attention if self.attention else 0.0

    def _of_possible(self, name: str) -> str:
        return f" of {self.possible[name] / 1e9:.3g}" if name in self.possible else ""

    def line(self) -> str:
        """One line for people."""
        wire = ", ".join(
            f"{'at least ' * low}{rate / 1e9:.3g}{self._of_possible(name)} GB/s {name}"
            for name, (rate, low) in self.wire.items()
        )
        parts = [
            f"attention {self.attention * 1e3:.1f} ms, {self.exposed * 1e3:.1f} ms of it waiting "
            f"({self.exposed_share:.1%})",
            f"wire {wire or 'not used'}",
            f"balance {self.balance_planned:.2f} planned, {self.balance_timed:.2f} timed",
        ]
        if (rank := self.slowest_rank) is not None:
            parts.append(
                f"slowest rank {rank.rank} ({rank.host}): {rank.slower - 1:+.0%}, in "
                f"{rank.share:.0%} of the calls"
            )
        if (link := self.slowest_link) is not None and link.slower > 1:
            parts.append(
                f"slowest link {link.sender} -> {link.receiver}: {link.slower:.1f} x, "
                f"{link.waited:.1%} of attention waits for it"
            )
        if self.plans >= 0.0005:
            parts.append(f"{self.plans * 1e3:.1f} ms waiting for plans")
        return f"timing of step {self.step}: {'; '.join(parts)}"


def group_findings(step: int, ranks: Sequence[RankTimes], clock_error: float = 0.0) -> Findings:
    """The findings of a context-parallel group."""
    calls = [[call for call in each.calls if call.hops] for each in ranks]
    attention = [
        sum(call.end - call.begin for call in each) + _exchanging(each)
        for each in (rank.calls for rank in ranks)
    ]
    exposed = [
        sum(wait.end - wait.begin for call in each.calls for wait in call.waits) for each in ranks
    ]
    found = list(messages(ranks))
    busy = [sum(hop.end - hop.begin for call in each for hop in call.hops) for each in calls]
    pairs = [float(sum(hop.pairs for call in each for hop in call.hops)) for each in calls]
    hosts = {each.rank: each.host for each in ranks}
    return Findings(
        step=step,
        ranks=len(ranks),
        calls=min(map(len, calls), default=0),
        attention=fmean(attention),
        exposed=fmean(exposed),
        exposed_max=max(exposed),
        hops=_by_hop(ranks),
        waits={
            name: seconds / len(ranks) for name, seconds in _waits_by_class(found, hosts).items()
        },
        wire=_wire(found, hosts),
        balance_planned=max(pairs) / fmean(pairs) if any(pairs) else 1.0,
        balance_timed=max(busy) / fmean(busy) if any(busy) else 1.0,
        plans=max(each.plan_seconds for each in ranks),
        slowest_rank=_slowest_rank(ranks, calls),
        slowest_link=_slowest_link(
            found,
            hosts,
            {each.rank: seconds for each, seconds in zip(ranks, attention, strict=True)},
        ),
        clock_error=clock_error,
    )


LARGEST = ("calls", "exposed_max", "balance_planned", "balance_timed", "plans", "clock_error")
"""Fields of a job that are the largest of those of its groups."""


def combined(groups: Sequence[Findings]) -> Findings:
    """The findings of a job from those of its groups: means by rank, and of slowest ones the
    slowest.
    """
    total = sum(each.ranks for each in groups)

    def mean(*values: float) -> float:
        return sum(value * each.ranks for value, each in zip(values, groups, strict=True)) / total

    def mean_of_hop(key: tuple[str, int], which: int) -> float:
        return mean(*(each.hops.get(key, (0.0, 0.0))[which] for each in groups))

    keys = dict.fromkeys(key for each in groups for key in each.hops)
    classes = [name for name in (INSIDE, BETWEEN) if any(name in each.wire for each in groups)]
    rates = {name: [each.wire[name] for each in groups if name in each.wire] for name in classes}
    ranks = [each.slowest_rank for each in groups if each.slowest_rank is not None]
    links = [each.slowest_link for each in groups if each.slowest_link is not None]
    return Findings(
        step=groups[0].step,
        ranks=total,
        attention=mean(*(each.attention for each in groups)),
        exposed=mean(*(each.exposed for each in groups)),
        hops={key: (mean_of_hop(key, 0), mean_of_hop(key, 1)) for key in keys},
        waits={name: mean(*(each.waits.get(name, 0.0) for each in groups)) for name in classes},
        wire={name: _median_rate(found) for name, found in rates.items()},
        slowest_rank=max(ranks, key=lambda rank: rank.slower, default=None),
        slowest_link=max(links, key=lambda link: link.slower, default=None),
        **{name: max(getattr(each, name) for each in groups) for name in LARGEST},
    )


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
    return (end, waited, before) if wait.arrivals else (wait.end, wait.end - wait.begin, 0.0)


def _exchanging(calls: Sequence[CallTimes]) -> float:
    return sum(
        wait.end - wait.begin
        for call in calls
        if call.direction == "exchange"
        for wait in call.waits
    )


def _by_hop(ranks: Sequence[RankTimes]) -> dict[tuple[str, int], tuple[float, float]]:
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for call in (call for each in ranks for call in each.calls):
        for hop in call.hops:
            found[call.direction, hop.hop][0] += hop.end - hop.begin
        for wait in call.waits:
            found[call.direction, wait.hop][1] += wait.end - wait.begin
    return {
        key: (compute / len(ranks), wait / len(ranks)) for key, (compute, wait) in found.items()
    }


def _class_of(message: TimedMessage, hosts: dict[int, str]) -> str:
    return class_of(hosts, message.sender, message.receiver)


def _waits_by_class(found: Sequence[TimedMessage], hosts: dict[int, str]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for message in found:
        seconds[_class_of(message, hosts)] += message.waited
    return dict(seconds)


def _exposed(message: TimedMessage) -> bool:
    """Whether the receiver waited long enough for the message to know when it arrived."""
    return message.waited > max(MASKED, 0.02 * (message.end - message.start))


def _wire(found: Sequence[TimedMessage], hosts: dict[int, str]) -> dict[str, tuple[float, bool]]:
    rates: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    for message in found:
        seconds = message.end - message.start
        if message.size and seconds > 0:
            rates[_class_of(message, hosts)].append((message.size / seconds, not _exposed(message)))
    return {name: _median_rate(rates[name]) for name in (INSIDE, BETWEEN) if name in rates}


def _median_rate(rates: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    """The median of what was measured, or else the best of the lower limits."""
    measured = [rate for rate, at_least in rates if not at_least]
    return (median(measured), False) if measured else (max(rate for rate, _ in rates), True)


def _slowest_rank(
    ranks: Sequence[RankTimes], calls: Sequence[Sequence[CallTimes]]
) -> SlowRank | None:
    """The rank that takes longest, call by call, also for a pair of query and key."""
    slower: list[list[float]] = [[] for _ in ranks]
    for same in zip(*calls, strict=False):
        seconds = [sum(hop.end - hop.begin for hop in call.hops) for call in same]
        pairs = [sum(hop.pairs for hop in call.hops) for call in same]
        if len(same) < 2 or not all(pairs) or min(seconds) <= 0:
            continue
        each_pair = [time / count for time, count in zip(seconds, pairs, strict=True)]
        for rank, ratios in enumerate(slower):
            ratios.append(
                min(
                    values[rank] / median(values[:rank] + values[rank + 1 :])
                    for values in (seconds, each_pair)
                )
            )
    if not any(slower):
        return None
    typical = [median(ratios) for ratios in slower]
    place = max(range(len(ranks)), key=typical.__getitem__)
    share = fmean(ratio > NOTABLE for ratio in slower[place])
    return SlowRank(ranks[place].rank, ranks[place].host, typical[place], share)


def _slowest_link(
    found: Sequence[TimedMessage], hosts: dict[int, str], attention: dict[int, float]
) -> SlowLink | None:
    """The link whose messages take longest, compared with other links of its class."""
    links: defaultdict[tuple[int, int], list[TimedMessage]] = defaultdict(list)
    for message in found:
        if message.known or _exposed(message):
            links[message.sender, message.receiver].append(message)
    typical = {
        pair: (median(m.end - m.start for m in of), median(m.size for m in of))
        for pair, of in links.items()
    }
    slow = []
    for (sender, receiver), of in links.items():
        seconds, size = typical[sender, receiver]
        kind = _class_of(of[0], hosts)
        others = [
            time * max(1.0, size / max(bytes_, 1))  # a smaller message need not be faster
            for pair, (time, bytes_) in typical.items()
            if pair != (sender, receiver) and _class_of(links[pair][0], hosts) == kind
        ]
        share = sum(map(_exposed, of)) / len(of)
        waited = sum(message.waited for message in of) / (attention[receiver] or 1.0)
        if others and share > 0.5:
            ratio = seconds / max(median(others), 1e-9)
            slow.append(
                SlowLink(sender, receiver, (hosts[sender], hosts[receiver]), ratio, share, waited)
            )
    return max(slow, key=lambda link: link.slower, default=None)


@dataclass
class _Streak:
    """Consecutive samples that blame the same."""

    who: object = None
    samples: list[Any] = field(default_factory=list)
    named: bool = False

    def add(self, who: object, sample: Any, doubt: bool = False) -> bool:
        """Adds a sample that blames `who`, or nobody (None). True once, when it is sure; with
        `doubt` it is not yet.
        """
        if who != self.who:
            self.who, self.samples, self.named = who, [], False
        if who is not None:
            self.samples.append(sample)
        sure = (
            not doubt
            and len(self.samples) >= SAMPLES
            and fmean(one.share for one in self.samples) >= SURE
        )
        first, self.named = sure and not self.named, sure or self.named
        return first


class Alarms:
    """Remembers samples, and names a rank or a link that was slow in `SAMPLES` consecutive ones."""

    def __init__(self) -> None:
        self._rank, self._link = _Streak(), _Streak()

    def lines(self, found: Findings) -> list[str]:
        """The warnings that a sample gives: one when a rank or link has been slow for `SAMPLES`
        samples.
        """
        rank, link = found.slowest_rank, found.slowest_link
        slow_rank = rank.rank if rank is not None and rank.slower >= SLOW_RANK else None
        lines = [_rank_line(self._rank.samples)] if self._rank.add(slow_rank, rank) else []
        slow_link = None
        if link is not None and link.slower >= SLOW_LINK and link.waited >= LINK_MATTERS:
            slow_link = link.sender, link.receiver
        # In one sample a rank may seem slow by chance. One that seems so twice may be what makes
        # its link slow.
        doubt = slow_link is not None and slow_rank in slow_link and len(self._rank.samples) >= 2
        return (
            [*lines, _link_line(self._link.samples)]
            if self._link.add(slow_link, link, doubt)
            else lines
        )


def _rank_line(samples: Sequence[SlowRank]) -> str:
    last, slower, share = (
        samples[-1],
        median(s.slower for s in samples),
        fmean(s.share for s in samples),
    )
    return (
        f"slow rank: rank {last.rank} on host {last.host} computes {slower - 1:.0%} longer than "
        f"the median of the others, in {len(samples)} consecutive samples; in {share:.0%} of their "
        f"calls more than {NOTABLE - 1:.0%}"
    )


def _link_line(samples: Sequence[SlowLink]) -> str:
    last, slower, waited = (
        samples[-1],
        median(s.slower for s in samples),
        fmean(s.waited for s in samples),
    )
    return (
        f"slow link: messages from rank {last.sender} on {last.hosts[0]} to rank {last.receiver} "
        f"on {last.hosts[1]} take {slower:.1f} times as long as on other links, in {len(samples)} "
        f"consecutive samples; the receiver waits for them {waited:.1%} of its attention time"
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
