"""Probe of a microbatch of the job's own length: what reaches the model and the loss of each token,
and with what weight.

The forward step of the job runs with the tiny model, whose layers are left out: it stops where they
would begin, and the losses of the tokens are ones. So a microbatch of any length takes
milliseconds. What a rank gets must be what the forward step gives a model of whole batch rows at
context parallel size 1, token by token, without any tolerance.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.wrapping import replaced

# relative difference of two weights; the weights that are drawn differ by a tenth or more
SAME = 1e-4
TOKENS = ("input_ids", "tokens")
BATCH = "by the batch itself"
NAMES = {
    "tokens": "token",
    "labels": "label",
    "position_ids": "position id",
    "loss_mask": "loss mask",
    "next": "label of the further prediction",
    "weights": "weight in the loss",
}
WHOLE = {"embedded": "embedding", "rotary": "rotary embedding"}

Seen = dict[str, Tensor]
"""What the forward step gave the model, tensors [b, s] by the names of `NAMES`; those of `WHOLE`
are [s, b or 1, ...].

`weights` are the derivatives of the loss by the losses of tokens; they are missing where the step
gave the model no labels.
"""


class _LayersBegin(BaseException):
    """Ends the forward pass of the tiny model before its first layer; no handler of a script takes
    it for an error of its own.
    """


def observe(model: Any, step: Callable[..., Any], data: dict[str, Any], vocabulary: int) -> Seen:
    """Runs the forward step `step` and its loss on `data`, without the layers of `model`, which has
    `vocabulary` tokens.
    """
    seen: Seen = {}
    with _recording(model, seen, vocabulary), suppress(_LayersBegin):
        output, loss = step(iter([data]), model)
        if (
            isinstance(output, Tensor)
            and output.requires_grad
            and output.numel() == seen["labels"].numel()
        ):
            (weights,) = torch.autograd.grad(
                loss(output)[0], output, allow_unused=True, materialize_grads=True
            )
            seen["weights"] = weights.detach().double().view(seen["labels"].shape)
    return seen


@contextmanager
def _recording(model: Any, seen: Seen, vocabulary: int) -> Iterator[None]:
    """Within the block the model notes its arguments in `seen`, and returns a loss of 1 for each
    token.

    Without labels it ends the forward step, because what the step wants in place of losses is
    unknown.
    """
    forward, signature = model.forward, inspect.signature(model.forward)

    @functools.wraps(forward)
    def record(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        inputs = bound.arguments
        name = next((name for name in TOKENS if isinstance(inputs.get(name), Tensor)), None)
        if name is None:
            raise _LayersBegin
        tokens, packed = inputs[name], inputs.get("packed_seq_params")
        for each in NAMES:
            if isinstance(inputs.get(each), Tensor):
                seen[each] = inputs[each].detach()
        seen["tokens"] = tokens.detach()
        if "labels" in seen and getattr(model.config, "mtp_num_layers", None):
            seen["next"] = _next_labels(seen["labels"], packed)
        seen.update(_rotary_of_layers(model, packed, tokens.shape[1]))
        inputs[name] = tokens % vocabulary
        _run_to_layers(model, functools.partial(forward, *bound.args, **bound.kwargs), seen)
        if "labels" not in seen:
            raise _LayersBegin
        return torch.ones(seen["labels"].shape, device=tokens.device, requires_grad=True)

    with replaced((model, "forward", record)):
        yield


def _run_to_layers(model: Any, forward: Callable[[], Any], seen: Seen) -> None:
    """Runs the forward pass as far as the first layer, which gets the embeddings of tokens and
    positions.
    """
    layers, embedding = getattr(model, "decoder", None), getattr(model, "embedding", None)
    if layers is None or embedding is None:
        return

    def begin(hidden_states: Any = None, *args: Any, **kwargs: Any) -> None:
        for name, x in ("embedded", hidden_states), ("rotary", kwargs.get("rotary_pos_emb")):
            if isinstance(x := _first(x), Tensor):
                seen[name] = x.detach()
        raise _LayersBegin

    def empty(input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A hidden state of no size: only learned positions need a real one, which is large for
        long batch rows.
        """
        parts = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
        return torch.zeros(input_ids.shape[1] // parts, len(input_ids), 1, device=input_ids.device)

    with ExitStack() as stack:
        stack.enter_context(suppress(_LayersBegin))
        stack.enter_context(torch.no_grad())
        stack.enter_context(replaced((layers, "forward", begin)))
        if not getattr(embedding, "add_position_embedding", True):
            stack.enter_context(replaced((embedding, "forward", empty)))
        forward()


def _rotary_of_layers(model: Any, packed: Any, s: int) -> dict[str, Tensor]:
    """The rotary embeddings of multi-latent attention, whose layers make their own, where those of
    all microbatches are alike.
    """
    if (
        packed is not None
        or settings.split_by_microbatch()
        or not getattr(model.config, "multi_latent_attention", False)
    ):
        return {}
    for module in model.modules():
        make = getattr(module, "rotary_pos_emb", None)
        if hasattr(module, "core_attention") and make is not None:
            return {"rotary": _first(make(s * compat.group_of(None, "cp").size()))}
    return {}


def _first(rotary: Any) -> Any:
    """Of yarn's embeddings and their scale the former; others as they are."""
    return rotary[0] if isinstance(rotary, tuple) else rotary


def _next_labels(labels: Tensor, packed: Any) -> Tensor:
    """What multi-token prediction makes of the labels: those one token further."""
    # heavy, and installed with Megatron only
    from megatron.core.transformer import multi_token_prediction

    roll = multi_token_prediction.roll_tensor
    rolled: Tensor = roll(
        labels, shifts=-1, dims=-1, cp_group=compat.group_of(None, "cp"), packed_seq_params=packed
    )[0]
    return rolled


def compare(ours: Seen, truth: Seen, positions: Tensor, mask: str) -> list[Probe]:
    """What this rank saw against whole batch rows; `positions` [b, s] are the places of this rank's
    tokens in them.
    """
    if "tokens" not in ours or "tokens" not in truth:
        return []
    about = _name_of(truth["tokens"]), mask
    probes = []
    for name, shown in NAMES.items():
        mine, whole = ours.get(name), truth.get(name)
        if mine is None or whole is None or mine.shape != positions.shape or whole.dim() != 2:
            # a model gets whole positions where it splits them by itself, as those of several axes
            continue
        expected = whole.gather(1, positions)
        if name == "weights":
            # Megatron, or the loss function, divides by numbers of tokens: the tiny model shows
            # whether by the right ones.
            mine, expected = (x / x.sum() if x.sum() else x for x in (mine, expected))
        probes.append(_probe(shown, mine, expected, positions, about))
    for name, shown in WHOLE.items():
        mine, whole = ours.get(name), truth.get(name)
        if mine is None or whole is None or len(whole) <= int(positions.max()):
            # a table of packed documents ends with the longest; the loss tells where only one side
            # has documents
            continue
        if len(mine) == positions.shape[1]:
            probes.append(_probe_of_embeddings(shown, mine, whole, positions, about))
    return probes


def _name_of(tokens: Tensor) -> str:
    return f"microbatch of {'x'.join(map(str, tokens.shape))} tokens"


def compare_declared(truth: Seen, data: dict[str, Any], mask: str) -> list[Probe]:
    """What whole batch rows have at context parallel size 1 against the batch itself: a fault of
    the forward step is the same at any size. Tokens whose loss mask is 0 have no weight; the step
    may leave out more. Those with a weight have their own label.
    """
    labels, weights = (truth.get(name) for name in ("labels", "weights"))
    if labels is None or weights is None or labels.shape != data["labels"].shape:
        return []
    about = _name_of(labels), mask
    hidden, declared = (data[name].to(labels.device) for name in ("loss_mask", "labels"))
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    unseen = torch.where(hidden == 0, 0.0, weights)
    counted = torch.where(weights == 0, labels, declared)
    return [
        _probe("weight of a token that the loss mask hides", weights, unseen, places, about, BATCH),
        _probe("label that counts", labels, counted, places, about, BATCH),
    ]


def _probe(
    name: str,
    mine: Tensor,
    expected: Tensor,
    positions: Tensor,
    about: tuple[str, str],
    source: str = "at cp 1",
) -> Probe:
    """Tokens [b, s] whose value is not the expected one, that of `source`."""
    tolerance = SAME * torch.maximum(mine.abs(), expected.abs()) if mine.is_floating_point() else 0

    def shown(*place: int) -> str:
        return f"{mine[place]:.6g}, {source} {expected[place]:.6g}"

    return _of_tokens(name, ~((mine - expected).abs() <= tolerance), positions, about, shown)


def _probe_of_embeddings(
    name: str, mine: Tensor, whole: Tensor, positions: Tensor, about: tuple[str, str]
) -> Probe:
    """Tokens whose embedding, of this rank [s, b or 1, ...] and of whole batch rows [n, b or 1,
    ...], differs.
    """
    batch_rows = max(mine.shape[1], whole.shape[1])
    places = positions.T[:, :batch_rows].to(whole.device)
    which = torch.arange(batch_rows, device=whole.device) if whole.shape[1] > 1 else 0
    wrong = (mine.flatten(2) != whole.flatten(2)[places, which]).any(2).T
    return _of_tokens(name, wrong, positions, about, lambda *place: "another than at cp 1")


def _of_tokens(
    name: str,
    wrong: Tensor,
    positions: Tensor,
    about: tuple[str, str],
    shown: Callable[[int, int], str],
) -> Probe:
    """Which tokens [b, s] are wrong; `shown` tells what one of them has, by batch row and place."""
    where = ""
    for batch_row, place in wrong.nonzero()[:1].tolist():
        token = int(positions[batch_row, place])
        where = f"token {token} of batch row {batch_row} has {shown(batch_row, place)}"
    return Probe(name, *about, float(wrong.sum()), 0.0, where, "tokens")


def uncovered(seen: Seen) -> list[str]:
    """What the observed microbatch does not show, in words."""
    if "tokens" not in seen:
        return ["the microbatch at the job's own length (the model takes no input_ids)"]
    names = (("labels", "labels"), ("weights", "weights of tokens"))
    missing = " and ".join(words for name, words in names if name not in seen)
    why = "at the job's own length (the forward step does not pass them on)"
    return [f"{missing} {why}"] if missing else []
