"""Lines that a job prints once."""

from __future__ import annotations

import os

from cp_ring.runtime import RUNTIME

_noted: set[str] = RUNTIME.keep(set())


def note(message: str, shown: bool | None = None) -> None:
    """Print `cp_ring: <message>` once per process, on rank 0 alone, or where `shown` is true."""
    if shown is None:
        shown = os.environ.get("RANK", "0") == "0"
    if shown and message not in _noted:
        print(f"cp_ring: {message}", flush=True)
    _noted.add(message)
