"""A Triton function, used where it can be compiled."""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from cp_ring.errors import one_line
from cp_ring.runtime import RUNTIME

RETRY_S = 60.0
_log = logging.getLogger(__name__)


class FusedFunction:
    """A Triton function that is tried at its first launch; the caller computes with torch
    operations if it cannot run.

    Triton compiles at the first launch, not at import, and needs a C compiler for that. A failure
    that cannot pass is final. Errors of files, such as those of Triton's cache on a full disk, may
    pass: the function is tried again `RETRY_S` later.
    """

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name
        self._function: Callable[..., Any] | None = None
        self._not_before = 0.0  # of the next try, in seconds of the monotonic clock
        self._first = threading.Lock()

    @property
    def rejected(self) -> bool:
        """True if the last try has failed."""
        return self._not_before > 0 and self._function is None

    def run(self, *args: Any) -> bool:
        """Run the function and return True. If it cannot run here, return False and log the reason
        once.
        """
        if self._function is None and time.monotonic() >= self._not_before:
            with self._first:  # the ranks of a `LocalRing` are threads, and one of them compiles
                if self._function is None and time.monotonic() >= self._not_before:
                    return self._tried(*args)
        if self._function is not None:
            self._function(*args)
        return self._function is not None

    def _tried(self, *args: Any) -> bool:
        """Import the function and run it for the first time."""
        try:
            function = getattr(importlib.import_module(self._module), self._name)
        except ImportError:
            self._not_before = math.inf
            return False
        try:
            function(*args)
        except (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError):
            raise  # a fault of the GPU or the host, not of Triton
        # Triton, its driver and the compiler raise exceptions of many types
        except Exception as error:
            reason = one_line(error)[:200]
            if "out of memory" in reason.lower():  # the driver's, as Triton words it
                raise
            passing = isinstance(error, OSError) and not isinstance(
                error, FileNotFoundError | PermissionError
            )
            self._not_before = time.monotonic() + RETRY_S if passing else math.inf
            _say(reason, passing)
            return False
        self._function = function
        return True


@RUNTIME.cache()
def _say(reason: str, passing: bool) -> None:
    """Warn once for each reason."""
    until = f"; it is tried again {RETRY_S:g} s later" if passing else ""
    _log.warning(
        "Triton cannot compile (%s): merges and sums of gradients use torch operations, which are "
        "slower%s",
        reason,
        until,
    )
