"""Counts messages, bytes, hops and used buffers of ring attention while `record` is active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from cp_ring.runtime import RUNTIME, Cell


@dataclass
class Counters:
    """Totals of one rank since its recording began. Bytes are payload. Only hops with tiles count.

    `bytes_by_kind` and `bytes_by_peer` count sent bytes, by kind (keys, gradients or heads) and by
    the rank of the group that receives them.
    """

    messages_sent: int = 0
    hops: int = 0
    slots_alive: int = 0
    slots_peak: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_by_peer: dict[int, int] = field(default_factory=dict)

    def add(self, kind: str, peer: int, size: int) -> None:
        """Count a sent message of `size` bytes."""
        with _lock:  # ranks may be threads of this process
            self.messages_sent += 1
            self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + size
            self.bytes_by_peer[peer] = self.bytes_by_peer.get(peer, 0) + size

    def slot(self, change: int) -> None:
        self.slots_alive += change
        self.slots_peak = max(self.slots_peak, self.slots_alive)


_recording: Cell[tuple[Counters, ...]] = RUNTIME.cell(())
_lock = Lock()


@contextmanager
def record() -> Iterator[Counters]:
    """Record this process until the block ends. Recordings may nest, and threads may record at the
    same time.

        with record() as counters:
            out = ring_attention(q, k, v)
    """
    counters = Counters()
    with _lock:
        _recording.value = (*_recording.value, counters)
    try:
        yield counters
    finally:
        with _lock:
            _recording.value = tuple(one for one in _recording.value if one is not counters)


def recording() -> tuple[Counters, ...]:
    """Return the counters that record now; usually there are none."""
    return _recording.value
