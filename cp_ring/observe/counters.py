"""Counts what ring attention really did: messages, bytes, hops and buffers alive. Off unless someone is recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Totals of one rank since recording began. Bytes are payload; hops are those with tiles."""

    messages_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    hops: int = 0
    slots_alive: int = 0
    slots_peak: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)

    def sent(self, kind: str, size: int) -> None:
        self.messages_sent += 1
        self.bytes_sent += size
        self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + size

    def slot(self, change: int) -> None:
        self.slots_alive += change
        self.slots_peak = max(self.slots_peak, self.slots_alive)


_recording: list[Ledger] = []


@contextmanager
def record() -> Iterator[Ledger]:
    """Records this process until the block ends; recordings may nest."""
    ledger = Ledger()
    _recording.append(ledger)
    try:
        yield ledger
    finally:
        _recording.remove(ledger)


def ledgers() -> list[Ledger]:
    """Those that are recording now; empty at most times."""
    return _recording
