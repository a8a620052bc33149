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
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import DocumentParams, documents_of, without_whole_rows
from cp_ring.megatron.certificate.batch import PREFIX, TOKENS, VOCABULARY, Batch
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.wrapping import replaced

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


def observe(
    model: Any, step: Callable[..., Any], data: dict[str, Any], before: Seen | None = None
) -> Seen:
    """Run the forward step `step` and its loss on `data`, without the layers of `model`.

    The model returns a loss of 1 for each token. If the step calls it without labels, it is unknown
    what the step wants in place of losses, and the step ends there.

    With `before`, what a whole model gets, the model is a later pipeline stage: it has no
    embedding, and the stage before it sends the hidden states.
    """
    seen: Seen = {}
    forward, signature = model.forward, inspect.signature(model.forward)
    layers = getattr(model, "decoder", None)

    def begin(hidden_states: Any = None, *args: Any, **kwargs: Any) -> None:
        for name, x in ("embedded", hidden_states), ("rotary", kwargs.get("rotary_pos_emb")):
            x = x[0] if isinstance(x, tuple) else x  # yarn's embeddings come with a scale
            if isinstance(x, Tensor):
                # Megatron's [s, b or 1, ...] as [b or 1, s, x]
                seen[name] = x.detach().transpose(0, 1).flatten(2)
        seen["packed"] = kwargs.get("packed_seq_params")
        raise _LayersBegin

    @functools.wraps(forward)
    def record(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        inputs = bound.arguments
        given = {name: x.detach() for name, x in inputs.items() if isinstance(x, Tensor)}
        for name in (each for each in TOKENS if each in given):
            seen.update({key: given[key] for key in NAMES if key in given})
            tokens = seen["tokens"] = given[name]
            inputs[name] = tokens % VOCABULARY
        if layers is not None and (before or "tokens" in seen):
            with suppress(_LayersBegin), torch.no_grad(), replaced((layers, "forward", begin)):
                forward(*bound.args, **bound.kwargs)
        if "labels" not in seen:
            raise _LayersBegin
        if getattr(model.config, "mtp_num_layers", None):
            from megatron.core.transformer import multi_token_prediction

            about = compat.group_of(None, "cp"), inputs.get("packed_seq_params")
            seen["next"] = multi_token_prediction.roll_tensor(seen["labels"], -1, -1, *about)[0]
        return torch.ones_like(seen["labels"], dtype=torch.float32, requires_grad=True)

    stage = []
    if before:
        sent = before["embedded"].transpose(0, 1)
        stage = [(model, "pre_process", False), (layers, "input_tensor", sent)]
    with replaced((model, "forward", record), *stage), suppress(_LayersBegin):
        output, loss = step(data and iter([data]), model)
        if output.numel() == seen["labels"].numel():
            (weights,) = torch.autograd.grad(
                loss(output)[0], output, allow_unused=True, materialize_grads=True
            )
            seen["weights"] = weights.detach().double().view(seen["labels"].shape)
    return seen


def compare_stages(whole: Seen, stages: list[Seen], batch: Batch) -> list[Probe]:
    """Compare the inputs of each of this rank's pipeline stages with those of a whole model on this
    rank: documents and masks, rotary embeddings, and labels and their weights if the stage has
    them.
    """

    def same(mine: Any, wanted: Any) -> bool:
        if isinstance(wanted, Tensor):
            return mine is not None and torch.equal(mine, wanted)
        return _same_documents(mine, wanted, whole["tokens"].shape)

    wrong = [
        f"stage {number} of this rank has another {NAMES.get(name, 'mask')} than a whole model"
        for number, seen in enumerate(stages)
        for name in seen.keys() | {"packed", "rotary"} & whole.keys()
        if not same(seen.get(name), whole[name])
    ]
    first = min(wrong, default="")
    probe = Probe("inputs of pipeline stages", *batch.about, len(wrong), 0.0, first, "places")
    return [probe] if stages else []


def _same_documents(mine: Any, whole: Any, shape: Any) -> bool:
    """Return True if both `packed_seq_params` split tokens of this shape [b, s] on this rank alike,
    by the same mask.
    """
    first, second = (_documents(packed, shape) for packed in (mine, whole))
    if first is None or second is None:
        return first is second
    rank = compat.group_of(None, "cp").rank()
    same = torch.equal(first.positions(rank), second.positions(rank))
    return same and first.mask().digest == second.mask().digest


def _documents(packed: Any, shape: Any) -> Any:
    """Return the documents of `packed_seq_params` whose tokens on this rank have this shape; None
    if each batch row is one.
    """
    cp = compat.group_of(None, "cp").size()
    packed = without_whole_rows(packed, shape[1] * cp)
    return packed and documents_of(packed, shape, cp, in_force())


def compare(ours: Seen, truth: Seen, batch: Batch, seed: int) -> list[Probe]:
    """Compare the inputs of this rank with those of whole batch rows, and the latter with `batch`
    itself.

    The last comparison finds faults of data and forward step that are the same at any size: tokens
    whose loss mask is 0 must have no weight, though the step may leave out more tokens, and tokens
    with a weight must have their own label, which is the next token.
    """
    rank = compat.group_of(None, "cp").rank()
    positions, packed = batch.positions[rank], batch.packed
    if not isinstance(packed, DocumentParams):  # a script may find documents by itself
        split = _documents(packed := truth.get("packed"), positions.shape)
        positions = split.places(rank).T if split else positions
    positions = positions.to(truth["labels"].device)
    batch_rows, s = positions.shape
    probes = []
    for name, shown in NAMES.items():
        mine, whole = ours.get(name), truth.get(name)
        # A model that splits positions itself, such as positions of several axes, gets whole ones;
        # a table for packed documents ends with the longest document.
        if mine is None or whole is None or not 1 < mine.dim() == whole.dim():
            continue
        rows_fit = {len(mine), len(whole)} <= {1, batch_rows}
        if rows_fit and mine.shape[1] == s and whole.shape[1] > int(positions.max()):
            rows = whole.expand(batch_rows, *whole.shape[1:])
            expected = rows[torch.arange(batch_rows)[:, None], positions]
            if name == "weights":
                # Megatron, or the loss function, divides by numbers of tokens; the tiny model shows
                # whether the numbers are right.
                mine, expected = (x / (x.sum() or 1) for x in (mine, expected))
            probes.append(_probe(shown, mine, expected, "at cp 1", batch, positions))
    if "packed" in ours:
        wrong = not _same_documents(ours["packed"], packed, positions.shape)
        where = "the layers get others than the batch has"
        probes.append(Probe("documents", *batch.about, float(wrong), 0.0, where, "microbatches"))
    return [*probes, *_by_itself(truth, batch, seed)]


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
    unseen = torch.where(hidden == 0, 0.0, weights)
    counted = torch.where(weights == 0, labels, declared)
    itself = "by the batch itself", batch
    yield _probe("weight of a token that the loss mask hides", weights, unseen, *itself)
    yield _probe("label that counts", labels, counted, *itself)
    tokens = truth.get("tokens", labels.new_empty(0))
    if tokens.shape != labels.shape:
        return
    counts = (weights != 0) & ~last
    near = [labels == tokens.roll(-shift, 1) for shift in (1, 0, 2)]
    own = near[: 1 if batch.mask.startswith(PREFIX) else 3]
    if max(float(each[counts].float().mean()) for each in own) > 0.5:
        following = torch.where(counts, tokens.roll(-1, 1), labels)
        yield _probe(NEXT, labels, following, "the batch has", batch)


def same_rows(batch: Batch) -> Probe:
    """Compare what the data iterators of this rank give with the whole batch rows."""
    whole, *mine = ({} if item is None else item for item in batch.items)
    wrong = {
        name
        for item in mine
        for name, x in item.items()
        if isinstance(x, Tensor) and not torch.equal(x, whole[name])
    }
    where = f"{min(wrong, default='')} is not that of the ranks that share its microbatch"
    return Probe("batch rows", *batch.about, len(wrong), 0.0, where, "tensors")


def _probe(
    name: str,
    mine: Tensor,
    expected: Tensor,
    source: str,
    batch: Batch,
    places: Tensor | None = None,
) -> Probe:
    """Count the tokens, at `places` [b, s] or in order, whose value [b, s, ...] differs from the
    value expected by `source`.
    """
    same = SAME * torch.maximum(mine.abs(), expected.abs()) if mine.is_floating_point() else 0
    wrong = ~((mine - expected).abs() <= same)
    wrong = wrong.flatten(2).any(2) if wrong.dim() > 2 else wrong
    where = ""
    for row, place in wrong.nonzero()[:1].tolist():
        token = place if places is None else int(places[row, place])
        where = f"token {token} of batch row {row} has another {name} than {source}"
    return Probe(name, *batch.about, float(wrong.sum()), 0.0, where, "tokens")
