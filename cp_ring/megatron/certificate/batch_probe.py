"""Probes a microbatch of the job's own length: what the model gets for each token, and the weight
of each token in the loss.

The forward step of the job runs with the tiny model without its layers: it stops where they would
begin, and the losses of the tokens are ones. So a microbatch of any length takes milliseconds. Each
token on a rank must be exactly what the forward step gives a model of whole batch rows at context
parallel size 1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import DocumentParams, documents_of, without_whole_rows
from cp_ring.megatron.certificate.batch import PREFIX, TOKENS, Batch, vocabulary_of, worst_of
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.wrapping import Function, replaced

# relative difference of two weights; drawn weights differ by a tenth or more
SAME = 1e-4
NEXT = "next token as label"
NAMES = {
    "tokens": "token",
    "labels": "label",
    "position_ids": "position id",
    "loss_mask": "loss mask",
    "next": "label of the further prediction",
    "weights": "weight in the loss",
    "embedded": "embedding",
    "rotary": "rotary embedding",
}

Seen = dict[str, Any]
"""The inputs that the forward step gave the model: tensors [b or 1, s, ...] by the names of
`NAMES`, and `packed`, the `packed_seq_params` of the layers.

`weights` are the derivatives of the loss by the losses of tokens. They are missing if the step gave
the model no labels.
"""


class _LayersBegin(Exception):
    """Ends the forward pass of the tiny model before its first layer."""


def observe(model: Any, step: Function, data: dict[str, Any], before: Seen | None = None) -> Seen:
    """Run the forward step `step` and its loss on `data`, without the layers of `model`.

    The model returns a loss of 1 for each token. If the step calls it without labels, it is unknown
    what the step wants in place of losses, and the step ends there.

    With `before`, what a whole model gets, the model is a later pipeline stage: it has no
    embedding, and the stage before it sends the hidden states.
    """
    seen: Seen = {}
    forward, layers = model.forward, getattr(model, "decoder", None)

    def begin(hidden_states: Any = None, *args: Any, **kwargs: Any) -> None:
        seen.update(packed=kwargs.get("packed_seq_params"), rotary=None)
        for name, x in ("embedded", hidden_states), ("rotary", kwargs.get("rotary_pos_emb")):
            x = x[0] if isinstance(x, tuple) else x  # yarn's embeddings come with a scale
            if isinstance(x, Tensor):
                # Megatron's [s, b or 1, ...] as [b or 1, s, x]
                seen[name] = x.detach().transpose(0, 1).flatten(2)
        raise _LayersBegin

    @functools.wraps(forward)
    def record(*args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(forward).bind(*args, **kwargs)
        inputs = bound.arguments
        for name, x in inputs.items():
            if isinstance(x, Tensor) and name in (*TOKENS, *NAMES):
                seen["tokens" if name in TOKENS else name] = x.detach()
                inputs[name] = x % vocabulary_of(model) if name in TOKENS else x
        if layers is not None and (before or "tokens" in seen):
            with suppress(_LayersBegin), torch.no_grad(), replaced((layers, "forward", begin)):
                forward(*bound.args, **bound.kwargs)
        if "labels" not in seen:
            raise _LayersBegin
        if getattr(model.config, "mtp_num_layers", None):
            from megatron.core.transformer import multi_token_prediction

            seen["next"], _ = multi_token_prediction.roll_tensor(
                seen["labels"],
                cp_group=compat.group_of(None, "cp"),
                packed_seq_params=inputs.get("packed_seq_params"),
            )
        return torch.ones_like(seen["labels"], dtype=torch.float32, requires_grad=True)

    stage = []
    if before:
        stage = [
            (model, "pre_process", False),
            (layers, "input_tensor", before["embedded"].transpose(0, 1)),
        ]
    with replaced((model, "forward", record), *stage), suppress(_LayersBegin):
        output, loss = step(data and iter([data]), model)
        if output.numel() == seen["labels"].numel():
            (weights,) = torch.autograd.grad(
                loss(output)[0], output, allow_unused=True, materialize_grads=True
            )
            seen["weights"] = weights.double().view(seen["labels"].shape)
    return seen


def compare_parts(name: str, parts: Sequence[Any], whole: Seen, batch: Batch) -> Iterator[Probe]:
    """Compare the tensors and documents of each of `parts`, pipeline stages or data iterators of
    this rank, with those of a whole model.
    """
    wrong = [
        f"number {number} has another {NAMES.get(key, 'mask')} than a whole model"
        for number, part in enumerate(parts)
        for key, x in (part or {}).items()
        if not _same(key, x, whole.get(key), batch.mine.shape)
    ]
    if parts:
        yield Probe(name, *batch.about, len(wrong), 0.0, min(wrong, default=""), "places")


def _same(key: str, mine: Any, whole: Any, shape: Any) -> bool:
    """Return True if two tensors are equal, or two `packed_seq_params` split tokens of this shape
    [b, s] on this rank alike, by the same mask.
    """
    if key != "packed":
        tensors = [x for x in (mine, whole) if isinstance(x, Tensor)]
        return not tensors or (len(tensors) == 2 and torch.equal(*tensors))
    first, second = (
        each and (each.positions(compat.group_of(None, "cp").rank()).tolist(), each.mask().digest)
        for each in (_documents(packed, shape) for packed in (mine, whole))
    )
    return bool(first == second)


def _documents(packed: Any, shape: Any) -> Any:
    """Return the documents of `packed_seq_params` whose tokens on this rank have this shape; None
    without any, as of a microbatch whose documents are lost.
    """
    cp = compat.group_of(None, "cp").size()
    packed = without_whole_rows(packed, shape[1] * cp)
    return packed and documents_of(packed, shape, cp, in_force())


def compare(ours: Seen, truth: Seen, batch: Batch, seed: int) -> Iterator[Probe]:
    """Compare the inputs of this rank with those of whole batch rows, and the latter with `batch`
    itself.

    The last comparison finds faults of data and forward step that are the same at any size: tokens
    whose loss mask is 0 must have no weight, though the step may leave out more tokens, and tokens
    with a weight must have their own label, which is the next token.
    """
    packed, shape = batch.packed, batch.mine.shape
    if not isinstance(packed, DocumentParams):  # a script may find documents by itself
        packed = truth.get("packed", packed)
        batch = replace(batch, split=_documents(packed, shape) or batch.split)
    for name, shown in NAMES.items():
        mine, whole = ours.get(name), truth.get(name)
        # A model that splits positions itself, such as positions of several axes, gets whole ones;
        # a table for packed documents ends with the longest document.
        if (
            mine is not None
            and whole is not None
            and 1 < mine.dim() == whole.dim()
            and {len(mine), len(whole)} <= {1, shape[0]}
            and mine.shape[1] == shape[1]
            and whole.shape[1] > int(batch.mine.max())
        ):
            expected = batch.on_rank(whole)
            if name == "weights":
                # Megatron, or the loss function, divides by numbers of tokens; the tiny model shows
                # whether the numbers are right.
                mine, expected = (x / (x.sum() or 1) for x in (mine, expected))
            yield _probe(shown, mine, expected, "at cp 1", batch, batch.mine)
    if "packed" in ours:
        wrong = not _same("packed", ours["packed"], packed, shape)
        what = "documents", *batch.about, float(wrong), 0.0
        yield Probe(*what, "the layers get others than the batch has", "microbatches")
    yield from _by_itself(truth, batch, seed)


def _by_itself(truth: Seen, batch: Batch, seed: int) -> Iterator[Probe]:
    """Compare the inputs of a whole model with the batch, and labels that count with the next
    tokens of their documents; but not for a job that predicts something else: most labels are none
    of the tokens nearby, or, under masks that batches declare, not the next ones.
    """
    data = batch.delivered(seed)
    if "weights" not in truth or data["labels"].numel() != truth["labels"].numel():
        return
    labels, weights = truth["labels"], truth["weights"]
    given = data["loss_mask"], data["labels"], torch.stack([rule.last for rule in batch.rules])
    hidden, declared, last = (x.to(labels.device).view(labels.shape) for x in given)
    unseen = weights.masked_fill(hidden == 0, 0.0)
    counted = torch.where(weights == 0, labels, declared)
    places = torch.arange(labels.shape[1]).expand(labels.shape)
    itself = "by the batch itself", batch, places
    yield _probe("weight of a token that the loss mask hides", weights, unseen, *itself)
    yield _probe("label that counts", labels, counted, *itself)
    tokens = truth.get("tokens")
    if tokens is None or tokens.shape != labels.shape:
        return
    counts = (weights != 0) & ~last
    shifts = (1,) if batch.mask.startswith(PREFIX) else (1, 0, 2)
    near = [(labels == tokens.roll(-shift, 1))[counts].float().mean() for shift in shifts]
    if max(near) > 0.5:
        following = torch.where(counts, tokens.roll(-1, 1), labels)
        yield _probe(NEXT, labels, following, "the batch has", batch, places)


def _probe(
    name: str, mine: Tensor, expected: Tensor, source: str, batch: Batch, places: Tensor
) -> Probe:
    """Count the tokens, at `places` [b, s], whose value [b, s, ...] differs from the value expected
    by `source`.
    """
    same = SAME * torch.maximum(mine.abs(), expected.abs()) if mine.is_floating_point() else 0
    wrong = ~((mine - expected).abs() <= same).reshape(*places.shape, -1).all(2)
    place = worst_of(wrong.float(), places)
    where = f"{place} has another {name} than {source}" if wrong.any() else ""
    return Probe(name, *batch.about, float(wrong.sum()), 0.0, where, "tokens")
