"""Computes the logits and the loss of some tokens at a time, so that the logits of a long batch row
are never all in memory.

Megatron's fused losses (--cross-entropy-loss-fusion) need less memory per logit, but hold the
logits of all tokens of a rank. This uses Megatron's own hook, the output processor of `GPTModel`.
In backward the logits of each part are computed again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from cp_ring.errors import ConfigError
from cp_ring.megatron.settings import current
from cp_ring.patches.patch import Patch, Replacement
from cp_ring.rollouts import in_chunks


def losses_in_chunks(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor,
    runtime_gather_output: bool | None, compute_language_model_loss: Callable[..., Tensor],
    scale_logits: Callable[[Tensor], Tensor], **_: Any,
) -> Tensor:  # fmt: skip
    """The loss of each token, [b, s]. The signature is that of Megatron's output processors.

    hidden_states: [s, b, hidden]; [s / tp, b, hidden] if the output layer gathers the parts of
    tensor-parallel ranks.
    labels: [b, s].

    There are at least two chunks. So the certificate, which probes few tokens, takes the path of
    training too.
    """
    tokens, batch = hidden_states.shape[:2]
    # what the output layer gathers of some tokens lies in one part of each rank
    parts = labels.shape[1] // tokens
    size = max(1, min(current().loss_chunk // (batch * parts), -(-tokens // 2)))

    def losses(hidden: Tensor, wanted: Tensor) -> Tensor:
        logits, _ = output_layer(
            hidden, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        return compute_language_model_loss(wanted.flatten(1), scale_logits(logits)).unflatten(
            1, wanted.shape[1:]
        )

    chunks = zip(
        hidden_states.split(size), labels.unflatten(1, (parts, tokens)).split(size, 2), strict=True
    )
    return in_chunks(losses, chunks, 2).flatten(1)


def _in_chunks(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(postprocess)

    @functools.wraps(postprocess)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if current().loss_chunk and given.get("labels") is not None:
            if given.get("output_processor") is not None:
                raise ConfigError(
                    "--cp-ring-loss-chunk: the script gives the model an output processor of its "
                    "own, which needs all logits at once: leave out either"
                )
            kwargs["output_processor"] = losses_in_chunks
        return postprocess(*args, **kwargs)

    return call


def _replacements() -> Iterator[Replacement]:
    from megatron.core.models.gpt import GPTModel

    yield GPTModel, "_postprocess", _in_chunks(GPTModel._postprocess)


PATCH = Patch(
    what="GPTModel computes logits and loss of --cp-ring-loss-chunk tokens at a time",
    why="the logits of all tokens of a rank are larger than everything else that a long sequence "
    "needs",
    versions=">=0.19,<0.21",
    when="--cp-ring --cp-ring-loss-chunk",
    replacements=_replacements,
)
