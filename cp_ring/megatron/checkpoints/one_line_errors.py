"""Ends a job whose process group runs with one line instead of a traceback on each rank."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from cp_ring.errors import ConfigError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process with the one line of a `ConfigError`, also of one that torch has wrapped."""
    try:
        yield
    except (ConfigError, CheckpointException) as error:
        ours = error if isinstance(error, ConfigError) else config_error_within(error)
        if ours is None:
            raise
        end(str(ours))


def config_error_within(error: Any) -> ConfigError | None:
    """The `ConfigError` that torch's `CheckpointException` wraps, or None."""
    return next((inner for inner, _ in error.failures.values() if isinstance(inner, ConfigError)), None)


def end(message: str) -> NoReturn:
    """Exits with code 2; the first rank that comes here prints `cp_ring: error: <message>`."""
    from torch.distributed.distributed_c10d import _get_default_store

    alone = not dist.is_initialized()
    first = os.environ.get("RANK", "0") == "0" if alone else _get_default_store().add("cp_ring/error", 1) == 1
    if first:
        print(f"cp_ring: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher ends all ranks as soon as one has, and the first must have spoken by then
    raise SystemExit(2)
