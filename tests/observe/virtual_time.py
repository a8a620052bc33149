"""Ranks of a `LocalRing` that keep a time of their own: kernels and links take as long as they are
told, on any machine.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cp_ring import ring_attention
from cp_ring.comm.transport import messages
from cp_ring.kernels.base import OPEN
from cp_ring.kernels.cpu import KERNEL
from cp_ring.observe import timing
from cp_ring.observe.spans import arrived
from cp_ring.observe.timed_messages import RankTimes
from cp_ring.testing.local_ring import LocalRing

PAIR_S = 1e-6  # seconds a pair of query and key takes
LINK_S = 2e-3  # seconds a message takes

_own = threading.local()


def pairs_of(tensors: Sequence[torch.Tensor], named: Mapping[str, Any]) -> float:
    """Pairs of queries and keys of a kernel call, full or causal, forward or backward, from its
    arguments.
    """
    q, k = tensors[:2] if len(tensors) == 3 else tensors[1:3]
    return q.shape[1] * k.shape[1] * (0.5 if named["hi"] < OPEN else 1.0)


class VirtualRing:
    """`size` ranks. `compute(rank)` and `link(sender, receiver)` are factors of the time of a
    kernel call and of a message.
    """

    def __init__(
        self,
        size: int,
        compute: Callable[[int], float],
        link: Callable[[int, int], float],
        monkeypatch,
    ) -> None:
        self.size, self.compute, self.link = size, compute, link
        self.stamps = defaultdict(list)
        monkeypatch.setattr(timing, "clock", lambda: getattr(_own, "time", 0.0))
        for name in ("forward", "backward"):
            # Not by setattr: what that leaves behind on an instance hides later patches of its
            # class.
            monkeypatch.setitem(vars(KERNEL), name, self.taking_time(getattr(KERNEL, name)))

    def taking_time(self, kernel):
        def run(*tensors, **named):
            _own.time += pairs_of(tensors, named) * PAIR_S * self.compute(_own.rank)
            return kernel(*tensors, **named)

        return run

    def sample(self, step: int, calls: int = 3, tokens: int = 32, **settings) -> list[RankTimes]:
        """The times of a step in which each rank makes some calls, forward and backward."""
        self.stamps.clear()
        with timing.record(settings.pop("kernels", False)) as recording:
            LocalRing(self.size).run(self._rank, calls, tokens, settings)
        found = recording.resolve()
        hosts = {rank: f"n{rank // 2}" for rank in range(self.size)}
        return [
            RankTimes(r, hosts[r], [call for call in found if call.rank == r])
            for r in range(self.size)
        ]

    def _rank(self, group, calls, tokens, settings):
        _own.rank, _own.time = group.rank, 100.0
        q, k, v = (torch.zeros(1, tokens, 2, 8, requires_grad=True) for _ in range(3))
        transport = VirtualGroup(self, group)
        for _ in range(calls):
            ring_attention(
                q, k, v, transport, causal=True, kernel="cpu", **settings
            ).sum().backward()


class VirtualGroup:
    """A rank's transport: a message travels when both ends have posted it and the link is free."""

    def __init__(self, ring: VirtualRing, group) -> None:
        self.rank, self.size, self.agree = group.rank, group.size, group.agree
        self._ring, self._group = ring, group
        self._expected, self._done = defaultdict(list), defaultdict(lambda: [0.0])

    def post(self, batch):
        to, come = (
            list(dict.fromkeys(peer for peer, _ in messages(each)))
            for each in (batch.sends, batch.receives)
        )
        for peer in to:
            self._ring.stamps[self.rank, peer].append(_own.time)
        for peer in come:
            self._expected[peer].append(_own.time)
        return _Arrival(
            self, self._group.post(batch), [(peer, len(self._expected[peer])) for peer in come]
        )

    def arrive(self, peer, number):
        done = self._done[peer]
        while len(done) <= number:  # messages pass a link one after the other
            place = len(done) - 1
            start = max(
                self._ring.stamps[peer, self.rank][place], self._expected[peer][place], done[-1]
            )
            done.append(start + LINK_S * self._ring.link(peer, self.rank))
        _own.time = max(_own.time, done[number])
        arrived(peer)


class _Arrival:
    def __init__(self, group, pending, expected):
        self._group, self._pending, self._expected = group, pending, expected

    def wait(self):
        self._pending.wait()
        for peer, number in self._expected:
            self._group.arrive(peer, number)
