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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from cp_ring.observe.timed_messages import RankTimes, TimedMessage, messages
from cp_ring.observe.timing import CallTimes

NOTABLE = 1.05
"""A call is notable in which a rank is this many times slower than the median of the others."""


INSIDE, BETWEEN = "inside nodes", "between nodes"
"""Classes of links: both ranks on one host, or on two."""


def class_of(hosts: Sequence[str] | dict[int, str], sender: int, receiver: int) -> str:
    """`INSIDE` or `BETWEEN`, from the host of each rank."""
    return INSIDE if hosts[sender] == hosts[receiver] else BETWEEN


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

    def record(self) -> dict[str, Any]:
        """As JSON: times in milliseconds, rates in GB/s."""
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
            "wire_at_least": [name for name, (_, at_least) in self.wire.items() if at_least],
            "balance_planned": round(self.balance_planned, 4),
            "balance_timed": round(self.balance_timed, 4),
            "plans_ms": _ms(self.plans),
            "slowest_rank": self.slowest_rank and asdict(self.slowest_rank),
            "slowest_link": self.slowest_link and asdict(self.slowest_link),
            "clock_error_ms": _ms(self.clock_error),
        }

    def scalars(self) -> dict[str, float]:
        """Numbers for TensorBoard, by name."""
        numbers = {
            "attention (ms)": self.attention * 1e3,
            "exposed communication (ms)": self.exposed * 1e3,
            "exposed communication (%)": self.exposed_share * 1e2,
            "balance, planned": self.balance_planned,
            "balance, timed": self.balance_timed,
            "waiting for plans (ms)": self.plans * 1e3,
        }
        numbers |= {f"wire {name} (GB per s)": rate / 1e9 for name, (rate, _) in self.wire.items()}
        if self.slowest_rank is not None:
            numbers["slowest rank"] = self.slowest_rank.rank
            numbers["slowest rank (times the median)"] = self.slowest_rank.slower
        return numbers

    @property
    def exposed_share(self) -> float:
        """The share of attention time that is waiting."""
        return self.exposed / self.attention if self.attention else 0.0

    def line(self) -> str:
        """One line for people."""
        wire = ", ".join(
            f"{'at least ' * low}{rate / 1e9:.3g} GB/s {name}"
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
        sum(
            call.waited if call.direction == "exchange" else call.end - call.begin
            for call in each.calls
        )
        for each in ranks
    ]
    exposed = [sum(call.waited for call in each.calls) for each in ranks]
    timed = list(messages(ranks))
    busy = [sum(call.computed for call in each) for each in calls]
    pairs = [float(sum(call.pairs for call in each)) for each in calls]
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
            name: seconds / len(ranks) for name, seconds in _waits_by_class(timed, hosts).items()
        },
        wire=_wire(timed, hosts),
        balance_planned=max(pairs) / fmean(pairs) if any(pairs) else 1.0,
        balance_timed=max(busy) / fmean(busy) if any(busy) else 1.0,
        plans=max(each.plan_seconds for each in ranks),
        slowest_rank=_slowest_rank(ranks, calls),
        slowest_link=_slowest_link(
            timed,
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
        wire={name: _median_rate(of_class) for name, of_class in rates.items()},
        slowest_rank=max(ranks, key=lambda rank: rank.slower, default=None),
        slowest_link=max(links, key=lambda link: link.slower, default=None),
        **{name: max(getattr(each, name) for each in groups) for name in LARGEST},
    )


def _by_hop(ranks: Sequence[RankTimes]) -> dict[tuple[str, int], tuple[float, float]]:
    computed: dict[tuple[str, int], float] = defaultdict(float)
    waited: dict[tuple[str, int], float] = defaultdict(float)
    for call in (call for each in ranks for call in each.calls):
        for hop in call.hops:
            computed[call.direction, hop.hop] += hop.seconds / len(ranks)
        for wait in call.waits:
            waited[call.direction, wait.hop] += wait.seconds / len(ranks)
    return {key: (computed[key], waited[key]) for key in computed | waited}


def _class_of(message: TimedMessage, hosts: dict[int, str]) -> str:
    return class_of(hosts, message.sender, message.receiver)


def _waits_by_class(timed: Sequence[TimedMessage], hosts: dict[int, str]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for message in timed:
        seconds[_class_of(message, hosts)] += message.waited
    return dict(seconds)


def _wire(timed: Sequence[TimedMessage], hosts: dict[int, str]) -> dict[str, tuple[float, bool]]:
    rates: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    for message in timed:
        if message.size and message.seconds > 0:
            rate = message.size / message.seconds
            rates[_class_of(message, hosts)].append((rate, not message.exposed))
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
        seconds, pairs = [call.computed for call in same], [call.pairs for call in same]
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
    timed: Sequence[TimedMessage],
    hosts: dict[int, str],
    attention: dict[int, float],
) -> SlowLink | None:
    """The link whose messages take longest, compared with other links of its class."""
    links: defaultdict[tuple[int, int], list[TimedMessage]] = defaultdict(list)
    for message in timed:
        if message.known or message.exposed:
            links[message.sender, message.receiver].append(message)
    typical = {
        pair: (median(message.seconds for message in of), median(message.size for message in of))
        for pair, of in links.items()
    }
    slow = []
    for (sender, receiver), of in links.items():
        seconds, size = typical[sender, receiver]
        kind = _class_of(of[0], hosts)
        others = [
            time * max(1.0, size / max(other_size, 1))  # a smaller message need not be faster
            for pair, (time, other_size) in typical.items()
            if pair != (sender, receiver) and class_of(hosts, *pair) == kind
        ]
        share = fmean(message.exposed for message in of)
        waited = sum(message.waited for message in of) / (attention[receiver] or 1.0)
        if others and share > 0.5:
            ratio = seconds / max(median(others), 1e-9)
            both = hosts[sender], hosts[receiver]
            slow.append(SlowLink(sender, receiver, both, ratio, share, waited))
    return max(slow, key=lambda link: link.slower, default=None)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
