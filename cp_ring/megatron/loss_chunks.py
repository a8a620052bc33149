"""Computes logits and loss for some tokens at a time, so that the logits of a long batch row are
never all in memory.

Megatron's fused losses (--cross-entropy-loss-fusion) need less memory per logit, but hold the
logits of all tokens of a rank. Here the output layer of a model returns logits that are not
computed yet. The loss, also of predictions of further tokens, computes them in chunks. The backward
pass computes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_ring.errors import ConfigError
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, arguments_of, around


class Logits:
    """The logits of all tokens of a rank, not computed yet; `of` computes the logits of some tokens
    from their hidden states.

    hidden: [s, b, hidden]; [s / tp, b, hidden] if the output layer gathers the parts of
        tensor-parallel ranks.
    """

    def __init__(self, of: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.of = of
        self.hidden = hidden

    def chunks(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the hidden states of some tokens, and the same tokens of `others`, each [b, s].

        There are at least two chunks, so that the certificate, which probes few tokens, takes the
        same path as training.
        """
        tokens, batch = self.hidden.shape[:2]
        # the output layer gathers a chunk from contiguous parts, one on each rank
        parts = others[0].shape[1] // tokens
        size = max(1, min(current().loss_chunk // (batch * parts), -(-tokens // 2)))
        split = (x.unflatten(1, (parts, tokens)).split(size, 2) for x in others)
        return zip(self.hidden.split(size), *split, strict=True)


class _OutputLayer:
    """Replaces a model's output layer: it returns `Logits`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, input_: Tensor, **options: Any) -> tuple[Logits, None]:
        return Logits(lambda some: self._layer(some, **options)[0], input_), None


@around
def _scaled(scale: Function, logits: Logits | None) -> Logits | None:
    # Megatron's branch dev has none yet
    return logits and Logits(lambda some: scale(logits.of(some)), logits.hidden)


@around
def losses_in_chunks(loss: Callable[..., Tensor], labels: Tensor, logits: Logits) -> Tensor:
    """Return the loss of each token, [b, s], with `loss` computed from labels and
    logits in chunks.
    """

    def losses(hidden: Tensor, wanted: Tensor) -> Tensor:
        values = loss(wanted.flatten(1), logits.of(hidden))
        return values.unflatten(1, wanted.shape[1:])

    if torch.is_grad_enabled():
        # Without reentry each parameter gets its gradient once, as the buckets of Megatron's
        # DistributedDataParallel expect.
        losses = partial(checkpoint, losses, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([losses(*chunk) for chunk in logits.chunks(labels)], 2).flatten(1)


def counted_in_chunks(
    count: Function, logits: Any, labels: Tensor, mask: Tensor, *rest: Any
) -> Any:
    """Wrap Megatron's count of correct predictions of further tokens."""
    if not isinstance(logits, Logits):
        return count(logits, labels, mask, *rest)
    with torch.no_grad():
        counts = [
            count(logits.of(hidden), *(x.flatten(1) for x in others), *rest)
            for hidden, *others in logits.chunks(labels, mask)
        ]
    return tuple(sum(each) for each in zip(*counts, strict=True))


def in_chunks(function: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the method of a model that computes its loss from labels."""
    known = arguments_of(function, self, *args, **kwargs)
    if not current().loss_chunk or known.get("labels") is None or not self.post_process:
        return function(self, *args, **kwargs)
    if known.get("output_processor") is not None:
        raise ConfigError(
            "--cp-ring-loss-chunk: the script gives the model an output processor of its own, "
            "which needs all logits at once: leave out one of the two"
        )
    # set in the dictionary, because torch keeps attributes for modules
    own = {
        "output_layer": _OutputLayer(self.output_layer),
        "_scale_logits": _scaled(self._scale_logits),
        "compute_language_model_loss": losses_in_chunks(self.compute_language_model_loss),
    }
    vars(self).update(own)
    try:
        return function(self, *args, **kwargs)
    finally:
        for name in own:
            del vars(self)[name]
