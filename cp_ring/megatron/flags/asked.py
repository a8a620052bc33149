"""Rejects jobs by checks, functions of the parsed arguments and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.options import Options

Check = Callable[[Asked, Options], str | None]
"""Returns one line `what is wrong: what to type` if the job cannot run, else None."""


def reject_where(checks: Iterable[Check], args: Any, options: Options) -> None:
    """Raise `ConfigError` with the lines of all checks that reject the job."""
    asked = Asked(args)
    if lines := [line for check in checks if (line := check(asked, options))]:
        raise ConfigError(*lines)
