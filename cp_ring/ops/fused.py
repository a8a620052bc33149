"""A Triton function, used where it can be compiled."""

from __future__ import annotations

import importlib
import logging
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
        self._function: Callable[..., Any] | None = None
        self._untried = True
        self._first = threading.Lock()

    def run(self, *args: Any) -> bool:
        """Run the function and return True. If it cannot run here, return False and log the reason
        once.
        """
        if self._untried:
            with self._first:  # the ranks of a `LocalRing` are threads, and one of them compiles
                if self._untried:
                    return self._tried(*args)
        if self._function is not None:
            self._function(*args)
        return self._function is not None

    def _tried(self, *args: Any) -> bool:
        """Import the function and run it for the first time."""
        try:
            function = getattr(importlib.import_module(self._module), self._name)
        except ImportError:
            self._untried = False
            return False
        try:
            function(*args)
        except (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError):
            raise  # a fault of the GPU or the host, not of Triton
        # Triton, its driver and the compiler raise exceptions of many types
        except Exception as error:
            reason = one_line(error)[:200]
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            ours = frame.f_globals["__name__"].startswith("cp_ring.")
            if ours or "out of memory" in reason.lower():  # the driver's, as Triton words it
                raise
            _say(reason)
        else:
            self._function = function
        self._untried = False
        return self._function is not None


@RUNTIME.cache()
def _say(reason: str) -> None:
    """Warn once for each reason."""
    _log.warning(
        "Triton cannot compile (%s): merges and sums of gradients use torch operations, which are "
        "slower",
        reason,
    )
