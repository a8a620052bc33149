"""Ends a job that cannot run with one line, and exit code 2; ends a rank that has failed soon."""

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
"""A rank that has failed is gone after as many seconds, whatever waits for what at its end."""
_noted: set[str] = RUNTIME.keep(set())


class Rejected(SystemExit):
    """The end of a rank whose job was rejected: the reason is printed."""


def reject(message: str, code: int = 2) -> NoReturn:
    """Prints `cp_ring: error: <message>` and exits with `code`.

    Most errors are those of all ranks. A launcher ends all ranks as soon as one has ended, so the
    others give rank 0 a few seconds to print the line for them. It also goes to the file of errors
    that torch's launcher shows when it ends.
    """
    if int(os.environ.get("RANK", "0")):
        time.sleep(_TURN_S + min(int(os.environ.get("LOCAL_RANK", "0")), 8) / 8)
    with contextlib.suppress(OSError):  # nobody reads it
        lines = [f"cp_ring: error: {line}" for line in message.splitlines()]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    _record(message)
    raise Rejected(code)


@contextlib.contextmanager
def ending_soon(script: str) -> Iterator[None]:
    """Where the block fails, this rank is gone `ENDING_S` seconds later, and the watchdogs of the
    others are told. An exit code of `script` that is not 0 is a line, and so is what Megatron
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
    with contextlib.suppress(OSError):  # there is no standard error
        faulthandler.dump_traceback_later(ENDING_S, exit=True, file=sys.__stderr__ or 2)
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from cp_ring.observe import watchdog

        watchdog.tell_failure(why)


def note(message: str, shown: bool | None = None) -> None:
    """Prints `cp_ring: <message>` on rank 0 alone, or where `shown` is true, once per process,
    however often it is called.
    """
    if shown is None:
        shown = int(os.environ.get("RANK", "0")) == 0
    if shown and message not in _noted:
        print(f"cp_ring: {message}", flush=True)
    _noted.add(message)


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Calls `reject` for errors of cp_ring."""
    try:
        yield
    except _OURS as error:
        reject(str(error))


def first_line(error: object) -> str:
    """The first line of the text of an error, "" where it has none."""
    return next(iter(str(error).strip().splitlines()), "")


def _record(message: str) -> None:
    """Writes the file of errors in the form that torch's launcher reads."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


@contextlib.contextmanager
def megatrons_rejections() -> Iterator[None]:
    """Raises Megatron's own objection to the flags as `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except _MEGATRONS as error:
        raise ConfigError(f"Megatron rejects these flags: {_text(error)}") from error


def _is_an_objection(error: BaseException) -> bool:
    """Whether Megatron itself rejects the job, before the first step."""
    before = getattr(compat.arguments(), "curr_iteration", None) is None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = str(frames[-1].f_globals.get("__name__", "")).startswith("megatron.")
    return before and own and isinstance(error, _MEGATRONS)


def _text(error: BaseException) -> str:
    """The text of an error; of an assertion without one its source."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(error) if str(error) else f"{last.line} ({last.filename}, line {last.lineno})"
