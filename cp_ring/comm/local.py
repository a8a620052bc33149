"""A whole context-parallel group in one process, a thread a rank: for trying, for accuracy tables, and for one GPU.

Messages are copies handed from thread to thread, so any number of ranks runs on any device, right though not fast.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from cp_ring.comm.transport import Batch, Pending, count, messages
from cp_ring.errors import ConfigError

TIMEOUT = 60.0
"""Seconds after which a message that nobody sent is given up."""


class LocalRing:
    """`size` ranks of this process; `run(case, ...)` calls `case(group, ...)` on each and returns the results by rank.

    `group` may be given to `ring_attention` in place of a process group. Raises what a rank raised.
    """

    def __init__(self, size: int):
        self.size = size
        self._arrived = threading.Condition()
        self._mail: dict[tuple[int, int, int], Tensor] = {}

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(self.size) as threads:
            groups = [LocalGroup(self, rank) for rank in range(self.size)]
            return [done.result() for done in [threads.submit(case, group, *args, **kwargs) for group in groups]]

    def put(self, key: tuple[int, int, int], rows: Tensor) -> None:
        with self._arrived:
            self._mail[key] = rows
            self._arrived.notify_all()

    def take(self, key: tuple[int, int, int]) -> Tensor:
        with self._arrived:
            if not self._arrived.wait_for(lambda: key in self._mail, TIMEOUT):
                raise ConfigError(f"rank {key[1]} of a local ring waited {TIMEOUT:g} s for message {key[2]} of rank {key[0]}")
            return self._mail.pop(key)


class LocalGroup:
    """One rank of a `LocalRing`: a transport. Between two ranks, the n-th message posted is the n-th received."""

    def __init__(self, ring: LocalRing, rank: int):
        self._ring = ring
        self.rank, self.size = rank, ring.size
        self._sent: dict[int, int] = defaultdict(int)
        self._awaited: dict[int, int] = defaultdict(int)

    def post(self, batch: Batch) -> Pending:
        """Follows `Transport.post`."""
        for peer, rows in messages(batch.sends):
            self._ring.put((self.rank, peer, self._sent[peer]), rows.clone())
            self._sent[peer] += 1
        expected = []
        for peer, rows in messages(batch.receives):
            expected.append(((peer, self.rank, self._awaited[peer]), rows))
            self._awaited[peer] += 1
        count(batch)
        return _Expected(self._ring, expected)


class _Expected:
    def __init__(self, ring: LocalRing, rows: list[tuple[tuple[int, int, int], Tensor]]):
        self._ring, self._rows = ring, rows

    def wait(self) -> None:
        for key, rows in self._rows:
            rows.copy_(self._ring.take(key))
