"""Ends a job that cannot run with one line and exit code 2, and ends a failed rank soon."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from cp_ring.errors import ConfigError, KernelError, PlanError, one_line
from cp_ring.megatron import compat
from cp_ring.runtime import RUNTIME

_OURS = (ConfigError, KernelError, PlanError)
_MEGATRONS = (AssertionError, ValueError, ArithmeticError, ImportError)
_TURN_S = 8.0
ENDING_S = 10.0
"""Seconds after which a failed rank is gone, even if something still waits at its end."""
_noted: set[str] = RUNTIME.keep(set())


class Rejected(SystemExit):
    """Ends a rank whose job was rejected; the reason is already printed."""


def reject(message: str, code: int = 2) -> NoReturn:
    """Print `cp_ring: error: <message>` and exit with `code`.

    Most errors occur on all ranks. A launcher ends all ranks as soon as one has ended, so the other
    ranks wait a few seconds for rank 0 to print the line. The line also goes to the error file that
    torch's launcher shows when it ends.
    """
    if int(os.environ.get("RANK", "0")):
        time.sleep(_TURN_S + min(int(os.environ.get("LOCAL_RANK", "0")), 8) / 8)
    with contextlib.suppress(OSError):  # standard error may be closed
        lines = [f"cp_ring: error: {line}" for line in message.splitlines()]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    _record(message)
    raise Rejected(code)


@contextlib.contextmanager
def ending_soon(script: str) -> Iterator[None]:
    """If the block fails, end this rank `ENDING_S` seconds later and tell the watchdogs of the
    others. Print one line for a nonzero exit code of `script`, and one line for a job that Megatron
    rejects before the first step.
    """
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        number = isinstance(end.code, int)
        why = f"{script} ended with exit code {end.code}" if number else str(end.code)
        _end_soon(why)
        if isinstance(end, Rejected):
            raise
        reject(f"rank {os.environ.get('RANK', '0')}: {why}", int(end.code) if number else 1)
    except BaseException as error:
        _end_soon(f"{type(error).__name__}: {one_line(error)}")
        _record("".join(traceback.format_exception(error)))
        if _is_an_objection(error):
            traceback.print_exc()
            reject(f"Megatron rejects this job: {_text(error)}")
        raise


def _end_soon(why: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        faulthandler.dump_traceback_later(ENDING_S, exit=True, file=sys.__stderr__ or 2)
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from cp_ring.observe import watchdog

        watchdog.tell_failure(why)


def note(message: str, shown: bool | None = None) -> None:
    """Print `cp_ring: <message>` once per process, on rank 0 alone, or where `shown` is true."""
    if shown is None:
        shown = int(os.environ.get("RANK", "0")) == 0
    if shown and message not in _noted:
        print(f"cp_ring: {message}", flush=True)
    _noted.add(message)


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Call `reject` for errors of cp_ring in the block."""
    try:
        yield
    except _OURS as error:
        reject(str(error))


def first_line(error: object) -> str:
    """Return the first line of an error's text, or ""."""
    return str(error).strip().partition("\n")[0]


def _record(message: str) -> None:
    """Write the error file in the form that torch's launcher reads."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


@contextlib.contextmanager
def megatrons_rejections() -> Iterator[None]:
    """Turn Megatron's own rejection of the flags into a `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except _MEGATRONS as error:
        raise ConfigError(f"Megatron rejects these flags: {_text(error)}") from error


def _is_an_objection(error: BaseException) -> bool:
    """Return True if Megatron itself rejects the job, before the first step."""
    before = getattr(compat.arguments(), "curr_iteration", None) is None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = str(frames[-1].f_globals.get("__name__", "")).startswith("megatron.")
    return before and own and isinstance(error, _MEGATRONS)


def _text(error: BaseException) -> str:
    """Return the text of an error; for an assertion without text, its source line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(error) if str(error) else f"{last.line} ({last.filename}, line {last.lineno})"
