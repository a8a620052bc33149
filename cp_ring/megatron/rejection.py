"""Ends a job that cannot run with one line, printed once whichever rank finds it first, and exit
code 2; ends a rank that has failed soon.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import faulthandler
import fcntl
import json
import linecache
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from cp_ring.errors import ConfigError, KernelError, PlanError, one_line
from cp_ring.megatron import compat, signals
from cp_ring.runtime import RUNTIME

_OURS = (ConfigError, KernelError, PlanError)
_KEY = "cp_ring/rejected"
_ERRORS = "TORCHELASTIC_ERROR_FILE"
# between the starts of the ranks of a job, where a script starts them without a launcher
_SKEW_S = 30.0
ENDING_S = 10.0
"""A rank that has failed is gone after as many seconds, whatever waits for what at its end."""
_LIMIT = datetime.timedelta(seconds=ENDING_S)  # for an answer of torch's launcher
_noted: set[str] = RUNTIME.keep(set())


class Rejected(SystemExit):
    """The end of a rank whose job was rejected: the reason is printed."""


def reject(message: str, code: int = 2) -> NoReturn:
    """Exits with `code`. The first rank of the job that comes here prints
    `cp_ring: error: <message>`, the others wait for it.

    A launcher ends all ranks as soon as one has ended, so none ends before the line is printed. The
    line also goes to the file of errors that torch's launcher shows when it ends.
    """
    with signals.ignored(), _turn() as first:
        if first:
            with contextlib.suppress(OSError):  # nobody reads it
                lines = [f"cp_ring: error: {line}" for line in message.splitlines()]
                print(*lines, sep="\n", file=sys.stderr, flush=True)
            _record(message)
    raise Rejected(code)


@contextlib.contextmanager
def ending_soon(script: str) -> Iterator[None]:
    """Where the block fails, this rank is gone `ENDING_S` seconds later, and the watchdogs of the
    others are told. An exit code of `script` that is not 0 is a line, and so is an assertion of
    Megatron's before the first step.
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
        if objection := _objection(error):
            traceback.print_exc()
            reject(objection)
        raise


def _end_soon(why: str) -> None:
    with contextlib.suppress(OSError):  # there is no standard error
        faulthandler.dump_traceback_later(ENDING_S, exit=True, file=sys.__stderr__ or 2)
    if _running():
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


@contextlib.contextmanager
def _turn() -> Iterator[bool]:
    """True for the first rank of the job that comes here; False for the others, once the first has
    left the block.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
    elif _running() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield from _turn_by_store()
    else:
        yield from _turn_by_file()


def _turn_by_store() -> Iterator[bool]:
    """`_turn` by the store of the process group or, before there is one, by that of torch's
    launcher.
    """
    key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = _store()
        first = store.add(key, 1) == 1
    except RuntimeError:
        # without a launcher rank 0 holds the store of a group: it has ended, and has said why
        yield not _running()
        return
    with contextlib.suppress(RuntimeError):
        if not first:
            store.wait([f"{key}/printed"], _LIMIT)
    yield first
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/printed", "1")


def _store() -> Any:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if _running():
        return _get_default_store()
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LIMIT
    )


def _turn_by_file() -> Iterator[bool]:
    """`_turn` by a lock on a file: the one that the batch script gives to all ranks, or one for the
    ranks of this host.
    """
    shared = os.environ.get(_ERRORS)
    job = [
        os.environ.get(name, "")
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
    ]
    name = f"cp_ring-rejected-{os.getuid()}-{os.getpgrp()}-{'-'.join(job).replace('/', '-')}"
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(
                Path(shared or Path(tempfile.gettempdir(), name)).open("a+")
            )
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            said = file.read()
        except OSError:
            yield True
            return
        # by an earlier job of the same name
        first = not said if shared else not said or float(said) < _begin() - _SKEW_S
        yield first
        if first and not shared:
            file.truncate(0)
            file.write(str(time.clock_gettime(time.CLOCK_BOOTTIME)))


def _begin() -> float:
    """When this process began, in seconds since the machine did."""
    import psutil

    return psutil.Process().create_time() - psutil.boot_time()


def _record(message: str) -> None:
    """Writes the file of errors in the form that torch's launcher reads."""
    path = os.environ.get(_ERRORS)
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


@contextlib.contextmanager
def megatrons_rejections() -> Iterator[None]:
    """Raises Megatron's own objection to the flags, an assertion or a `ValueError`, as
    `ConfigError`.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron rejects these flags: {_text(error)}") from error


def _objection(error: BaseException) -> str:
    """The line for an assertion of Megatron's before the first step, else ""."""
    step = getattr(compat.arguments(), "curr_iteration", None)
    name = _innermost(error).tb_frame.f_globals.get("__name__", "")
    if not isinstance(error, AssertionError) or step is not None or not name.startswith("megatron"):
        return ""
    return f"Megatron rejects this job: {_text(error)}"


def _text(error: BaseException) -> str:
    """The text of an error. Of an assertion without one: its source, and the values of the names in
    it.
    """
    if str(error) or not isinstance(error, AssertionError):
        return one_line(error)
    frame, line = _innermost(error).tb_frame, _innermost(error).tb_lineno
    statement = _statement(frame.f_code.co_filename, line)
    if statement is None:
        return f"AssertionError in {frame.f_code.co_filename}, line {line}"
    values = {}
    for node in ast.walk(statement.test):
        if isinstance(node, ast.Name | ast.Attribute):
            with contextlib.suppress(Exception):  # a name that an earlier part of the test guards
                value = eval(ast.unparse(node), frame.f_globals, frame.f_locals)
                if isinstance(value, int | float | str | list | tuple | None):
                    values[ast.unparse(node).removeprefix("args.")] = value
    shown = ", ".join(f"{name} {value!r}" for name, value in values.items())
    return f"assert {ast.unparse(statement.test)}" + f" ({shown})" * bool(shown)


def _innermost(error: BaseException) -> TracebackType:
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _statement(file: str, line: int) -> ast.Assert | None:
    """The assertion of a source file that holds a line."""
    tree = ast.parse("".join(linecache.getlines(file)))
    return next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or 0)
        ),
        None,
    )


def _running() -> bool:
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    )
