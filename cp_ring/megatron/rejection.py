"""Ends a job that cannot run with one line, printed once, and exit code 2."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from cp_ring.errors import ConfigError, KernelError, PlanError

_HEAD_START_S = 5.0
_noted: set[str] = set()


def reject(message: str) -> NoReturn:
    """Prints `cp_ring: error: <message>` on rank 0 alone and exits with code 2.

    The other ranks wait a few seconds first: a launcher ends all ranks as soon as one fails, and rank 0 must print before that.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"cp_ring: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(_HEAD_START_S)
    raise SystemExit(2)


def note(message: str) -> None:
    """Prints `cp_ring: <message>` on rank 0 alone, once per process, however often it is called."""
    if message not in _noted and int(os.environ.get("RANK", "0")) == 0:
        print(f"cp_ring: {message}", flush=True)
    _noted.add(message)


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Calls `reject` for errors of cp_ring while no process group exists; later errors are raised unchanged."""
    try:
        yield
    except (ConfigError, KernelError, PlanError) as error:
        if _running():
            raise
        reject(str(error))


@contextlib.contextmanager
def megatrons_rejections() -> Iterator[None]:
    """Raises Megatron's own objection to the flags, an assertion or a `ValueError` with a message, as `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError) as error:
        if not str(error):
            raise
        raise ConfigError(f"Megatron rejects these flags: {' '.join(str(error).split())}") from error


def _running() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
