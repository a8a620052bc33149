"""Attention results that are kept while activations are recomputed, so that the ring runs once.

Megatron's full recomputation runs a block of layers without gradients in forward and again, with them, in backward. Recomputing
attention would send all keys around the ring a second time. Here each such call keeps what its attention layers made, out and
lse, and the second run takes it from there; its backward is the usual one.

What is kept belongs to one call of one block with one microbatch and lives in that call's autograd node: no counter or table
has to follow microbatches in flight, virtual stages, or a step that failed and is run again, and it is gone when the node is.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from cp_ring.attention import Results

_now: contextvars.ContextVar[KeptCall | None] = contextvars.ContextVar("cp_ring_kept_call", default=None)
_alive: weakref.WeakSet[KeptCall] = weakref.WeakSet()


class KeptCall:
    """A function that will run twice on the same inputs: the first time results are kept, the second time they are taken."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._runs = 0
        self._results: defaultdict[Any, deque[Results]] = defaultdict(deque)
        _alive.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _now.set(self)
        self._runs += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _now.reset(token)

    def results(self, layer: Any) -> Results | None:
        """For the next call of `layer`: empty ones to fill in the first run, full ones later; None where there are none."""
        if self._runs == 1:
            if torch.is_grad_enabled():
                return None  # autograd keeps the tensors of this run itself
            self._results[layer].append(Results())
            return self._results[layer][-1]
        kept = self._results[layer]
        return kept.popleft() if kept else None

    def size(self) -> int:
        """Bytes that are kept."""
        return sum(results.size() for kept in self._results.values() for results in kept)


def results_for(layer: Any) -> Results | None:
    """What the attention layer `layer` has to fill or to take in the block that runs now; None outside of recomputed blocks."""
    call = _now.get()
    return call.results(layer) if call else None


def kept_bytes() -> int:
    """Bytes of out and lse that this process keeps for recomputations to come."""
    return sum(call.size() for call in list(_alive))


def keeping(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a `checkpoint(function, ...)` so that what attention makes in `function` is kept; unchanged without gradients."""

    @functools.wraps(checkpoint)
    def checkpoint_and_keep(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(KeptCall(function) if torch.is_grad_enabled() else function, *args, **kwargs)

    return checkpoint_and_keep
