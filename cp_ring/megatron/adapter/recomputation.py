"""Keeps the results of attention while activations are recomputed, so that the ring runs once.

Megatron's full recomputation runs a block of layers twice: in forward without gradients, and in
backward with gradients. The second run of attention would send all keys around the ring again.
Instead each call of a block keeps the results of its attention layers, out and lse, and the second
run takes them. The backward of attention is the usual one.

The results belong to one call of one block with one microbatch. They live in the autograd node of
that call, and are freed with it. So there is no counter or table to keep in agreement with
microbatches in flight, virtual stages, or a step that is run again.
"""

from __future__ import annotations

import contextvars
from collections import defaultdict, deque
from typing import Any

import torch

from cp_ring.inputs import KeptOutput, Output
from cp_ring.megatron.wrapping import Function

_now: contextvars.ContextVar[KeptCall | None] = contextvars.ContextVar(
    "cp_ring_kept_call", default=None
)


class KeptCall:
    """A function that runs twice with the same inputs. The first run keeps the results of
    attention; the second run takes them.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._runs = 0
        self._kept: defaultdict[Any, deque[KeptOutput]] = defaultdict(deque)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _now.set(self)
        self._runs += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            _now.reset(token)

    def take(self, layer: Any) -> KeptOutput | None:
        """Return the kept result of the next call of `layer` in the second run, or None."""
        kept = self._kept[layer]
        return kept.popleft() if self._runs > 1 and kept else None

    def keep(self, layer: Any, output: Output) -> None:
        """Keep an output of the first run, unless autograd already keeps the tensors of
        that run.
        """
        if self._runs == 1 and not torch.is_grad_enabled():
            self._kept[layer].append(KeptOutput.of(output))


def current() -> KeptCall | None:
    """Return the call of the block that runs now, if the block is recomputed later."""
    return _now.get()


def keeping(checkpoint: Function, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap `checkpoint(function, ...)` so that the attention results in `function` are kept if
    gradients are enabled.
    """
    return checkpoint(KeptCall(function) if torch.is_grad_enabled() else function, *args, **kwargs)
