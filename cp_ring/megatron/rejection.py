"""Ends a job that cannot run with one line and exit code 2."""

from __future__ import annotations

import contextlib
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

OURS = (ConfigError, KernelError, PlanError)
_MEGATRONS = (AssertionError, ValueError, ArithmeticError, ImportError)
_OPTIMIZER = (
    "give --use-distributed-optimizer if, and only if, the job that saved the checkpoint had it, "
    "or --no-load-optim"
)
ADVICE = {
    '"optimizer.state.': _OPTIMIZER,
    "flattened_range is not supported": _OPTIMIZER,
    "not divisible by total_model_size": "start a multiple of tensor x pipeline x context parallel "
    "size ranks (torchrun --nproc-per-node), or lower --context-parallel-size",
    "OptimizerParamScheduler: class input": "give --override-opt-param-scheduler to take the "
    "flags, or --use-checkpoint-opt-param-scheduler to take the checkpoint",
    "assert args.save_interval is not None": "give --save-interval",
    "only supported by TEDotProductAttention": "give --cp-ring, or --transformer-impl "
    "transformer_engine where TransformerEngine is installed",
}


class Rejected(SystemExit):
    """Ends a rank whose job was rejected; the reason is already printed."""


def reject(message: str, code: int = 2) -> NoReturn:
    """Print `cp_ring: error: <message>` and exit with `code`.

    Most errors occur on all ranks. Of those that torch's launcher started on this machine, the
    first one prints. The line also goes to the error file that the launcher shows when it ends.
    """
    with contextlib.suppress(OSError):  # another rank was first, or standard error is closed
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(path).parents[1].joinpath("rejected").touch(exist_ok=False)
        lines = [f"cp_ring: error: {line}\n" for line in message.splitlines()]
        print("".join(lines), end="", file=sys.stderr, flush=True)
    record(message)
    raise Rejected(code)


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Call `reject` for errors of cp_ring in the block; after a step they are failures."""
    try:
        yield
    except OURS as error:
        reject(str(error), 1 if compat.steps_done() else 2)


def first_line(error: object) -> str:
    """Return the first line of an error's text, or ""."""
    return str(error).strip().partition("\n")[0]


def record(message: str) -> None:
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
        raise ConfigError(f"Megatron rejects these flags: {megatrons_text(error)}") from error


def megatrons_text(error: BaseException) -> str:
    """Return the text of an error of Megatron, or the source line of an assertion without text, and
    what to change where that is known.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = one_line(error) or f"{last.line} ({last.filename}, line {last.lineno})"
    # of a traceback in the text, its last line
    return ": ".join(
        [
            said.rpartition("Error: ")[2][:400],
            *(advice for part, advice in ADVICE.items() if part in said),
        ]
    )
