"""Warnings of slow ranks and slow links, which are given once several samples agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from cp_ring.observe.findings import NOTABLE, Findings, SlowLink, SlowRank

SLOW_RANK = 1.10
"""A rank this many times slower than the median of the others is slow."""
SLOW_LINK, LINK_MATTERS = 3.0, 0.05
"""A link is slow whose messages take this many times longer than on others of its class, and for
which at least this share of the receiver's attention time is waited. A link of a slow rank is not
to blame."""
SURE = 0.6
"""Share of the calls, or messages, in which it must have been so."""
SAMPLES = 3
"""Consecutive samples after which a slow rank or link is named."""


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
            and fmean(sample.share for sample in self.samples) >= SURE
        )
        first, self.named = sure and not self.named, sure or self.named
        return first


class Alarms:
    """Remembers samples, and names a rank or a link that was slow in `SAMPLES` consecutive ones."""

    def __init__(self) -> None:
        self._rank, self._link = _Streak(), _Streak()

    def lines(self, findings: Findings) -> list[str]:
        """The warnings that a sample gives: one when a rank or link has been slow for `SAMPLES`
        samples.
        """
        rank, link = findings.slowest_rank, findings.slowest_link
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
    last, slower = samples[-1], median(sample.slower for sample in samples)
    share = fmean(sample.share for sample in samples)
    return (
        f"slow rank: rank {last.rank} on host {last.host} computes {slower - 1:.0%} longer than "
        f"the median of the others, in {len(samples)} consecutive samples; in {share:.0%} of their "
        f"calls more than {NOTABLE - 1:.0%}"
    )


def _link_line(samples: Sequence[SlowLink]) -> str:
    last, slower = samples[-1], median(sample.slower for sample in samples)
    waited = fmean(sample.waited for sample in samples)
    return (
        f"slow link: messages from rank {last.sender} on {last.hosts[0]} to rank {last.receiver} "
        f"on {last.hosts[1]} take {slower:.1f} times as long as on other links, in {len(samples)} "
        f"consecutive samples; the receiver waits for them {waited:.1%} of its attention time"
    )
