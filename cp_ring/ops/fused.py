"""A Triton function, used where it can be compiled."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)


class FusedFunction:
    """A Triton function that is tried at its first launch; the caller computes with torch operations if it cannot run.

    Triton compiles at the first launch, not at import, and needs a C compiler for that.
    """

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name
        self._function: Callable[..., Any] | None = None
        self._rejected = False
        self._first = threading.Lock()

    def run(self, *args: Any) -> bool:
        """Runs the function and returns true; returns false if it cannot run here, and says why once."""
        if self._function is None and not self._rejected:
            with self._first:  # the ranks of a `LocalRing` are threads, and one of them compiles
                if self._function is None and not self._rejected:
                    return self._tried(*args)
        if self._function is not None:
            self._function(*args)
        return self._function is not None

    def _tried(self, *args: Any) -> bool:
        """The first run."""
        try:
            function = getattr(importlib.import_module(self._module), self._name)
        except ImportError:
            self._rejected = True
            return False
        try:
            function(*args)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise  # a fault of the GPU, not of Triton
        except Exception as error:  # Triton, its driver and the compiler raise exceptions of many types
            self._rejected = True
            _say(" ".join(str(error).split())[:200])
            return False
        self._function = function
        return True


@cache
def _say(reason: str) -> None:
    """Warns once for each reason."""
    _log.warning("Triton cannot compile (%s): merges and sums of gradients use torch operations, which are slower", reason)
