"""A Triton function, used where it can be compiled."""

from __future__ import annotations

import importlib
import logging
import subprocess
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from cp_ring.errors import one_line
from cp_ring.runtime import RUNTIME

_log = logging.getLogger(__name__)


class FusedFunction:
    """A Triton function that is tried at its first launch; the caller computes with torch
    operations if it cannot run.

    Triton compiles at the first launch, not at import, and needs a C compiler for that. If it
    fails, there is no other launch.
    """

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name
        self._function: Callable[..., Any] = torch.add  # until it is imported
        self._runs: bool | None = None
        self._first = threading.Lock()

    def run(self, *args: Any) -> bool:
        """Run the function and return True. If it cannot run here, return False and log the reason
        once.
        """
        if self._runs is None:
            with self._first:  # the ranks of a `LocalRing` are threads, and one of them compiles
                if self._runs is None:
                    self._runs = self._tried(*args)
                    return self._runs
        if self._runs:
            self._function(*args)
        return self._runs

    def _tried(self, *args: Any) -> bool:
        """Import the function and run it for the first time."""
        try:
            self._function = getattr(importlib.import_module(self._module), self._name)
        except ImportError:
            return False
        try:
            self._function(*args)
        except Exception as error:
            reason = one_line(error)[:200]
            # the driver's lack of memory, as Triton words it, is no fault of Triton
            if not _of_triton(error) or "out of memory" in reason.lower():
                raise
            _say(reason)
            return False
        return True


def _of_triton(error: Exception) -> bool:
    """Return True if Triton raised an error of its own, or could not find or run its driver or a
    compiler; False for wrong arguments, faults of the GPU, and errors of our own code.
    """
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return False
    if type(error).__module__.startswith("triton."):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    inside = any(str(frame.f_globals.get("__name__")).startswith("triton.") for frame, _ in frames)
    return inside and isinstance(error, _OF_ITS_TOOLS)


_OF_ITS_TOOLS = AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError
"""What Triton raises where a compiler, its cache or the driver is missing."""


@RUNTIME.cache()
def _say(reason: str) -> None:
    """Warn once for each reason."""
    _log.warning(
        "Triton cannot compile (%s): merges and sums of gradients use torch operations, which are "
        "slower",
        reason,
    )
