"""The steps that a job is asked to trace, as its flag names them. Nothing heavy is imported: the
flags are read before torch.
"""

from __future__ import annotations

import re

from cp_ring.errors import ConfigError


def parse_trace(text: str) -> range:
    """The steps that STEP[:COUNT] asks for; none for "". Raises `ConfigError`."""
    if not text:
        return range(0)
    if not re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", text):
        raise ConfigError("it is not STEP or STEP:COUNT, numbers from 1 on")
    first, _, count = text.partition(":")
    return range(int(first), int(first) + int(count or "1"))
