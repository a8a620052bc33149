"""Ends a failed rank soon, and says why where its error does not."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import traceback
from collections.abc import Iterator

from cp_ring.errors import one_line
from cp_ring.megatron import compat
from cp_ring.megatron.rejection import ADVICE, OURS, Rejected, megatrons_text, record, reject

ENDING_S = 10.0
"""Seconds after which a failed rank is gone, even if something still waits at its end."""
_CODES = {
    "16": ": a rerun of the step gives the same wrong loss or gradient: resume from its checkpoint "
    "on other GPUs, which shows whether a GPU is faulty, or from an earlier one",
    "17": ": a loss or gradient is wrong, and the log says whether a GPU is faulty: resume from an "
    "earlier checkpoint",
}
"""What exit codes of Megatron mean, which reruns a step whose loss or gradient is not finite."""
_FULL = 2**20  # free bytes of a disk, of which a failed save leaves few


@contextlib.contextmanager
def ending_soon(script: str) -> Iterator[None]:
    """If the block fails, end this rank `ENDING_S` seconds later and tell the watchdogs of the
    others. Print one line for a nonzero exit code of `script`, and one line where more is known
    than the error says.
    """
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        number = isinstance(end.code, int)
        why = str(end.code)
        if number:
            why = f"{script} ended with exit code {why}{_CODES.get(why, '')}"
        _end_soon(why)
        if isinstance(end, Rejected):
            raise
        reject(f"rank {os.environ.get('RANK', '0')}: {why}", int(end.code) if number else 1)
    except BaseException as error:
        _end_soon(f"{type(error).__name__}: {one_line(error)}")
        record("".join(traceback.format_exception(error)))
        if not isinstance(error, OURS) and (reason := _reason(error)):
            traceback.print_exc()
            reject(reason, 1)
        raise


def _end_soon(why: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed
        faulthandler.dump_traceback_later(ENDING_S, exit=True, file=sys.__stderr__ or 2)
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        from cp_ring.observe import watchdog

        watchdog.tell_failure(why)


def _reason(error: BaseException) -> str:
    """Return what an error of Megatron does not say: which flag to change, that a loss is not
    finite and its step cannot be saved, or that a disk is full, which its writers report as
    anything else. "" if nothing is known.
    """
    if any(part in str(error) for part in ADVICE):
        return megatrons_text(error)
    save = str(getattr(compat.arguments(), "save", None))
    rerun = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(rerun, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if save == "None" and "WILL_RERUN" in str(getattr(machine, "state", "")):
        return (
            "the loss or a gradient is not finite, also in a rerun of the step, which Megatron "
            "saves to run it on another GPU: give --save, or --rerun-mode disabled to end at once"
        )
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(save).free) < _FULL:
            return f"No space left on the disk of --save {save}: {free} bytes are free"
    return ""
