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
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate.report import Probe

# relative difference of two weights; the weights that are drawn differ by a tenth or more
SAME = 1e-4
TOKENS = ("input_ids", "tokens")
BATCH = "by the batch itself"
NAMES = {"labels": "label", "position_ids": "position id", "loss_mask": "loss mask", "next":
    "label of the further prediction",
         "weights": "weight in the loss"}  # fmt: skip
WHOLE = {"embedded": "embedding", "rotary": "rotary embedding"}


@dataclass
class Seen:
    """What the forward step gave the model, tensors [b, s] by the names of `NAMES`; those of
    `WHOLE` are [s, b or 1, ...].

    `weights` are the derivatives of the loss by the losses of tokens; they are missing where the
    step gave the model no labels.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)


class _LayersBegin(BaseException):
    """Ends the forward pass of the tiny model before its first layer; no handler of a script takes
    it for an error of its own.
    """


def observe(model: Any, step: Callable[..., Any], data: dict[str, Any], vocabulary: int) -> Seen:
    """Runs the forward step `step` and its loss on `data`, without the layers of `model`, which has
    `vocabulary` tokens.
    """
    seen = Seen()
    with _recording(model, seen, vocabulary), suppress(_LayersBegin):
        output, loss = step(iter([data]), model)
        if (
            isinstance(output, Tensor)
            and output.requires_grad
            and output.numel() == seen.tensors["labels"].numel()
        ):
            (weights,) = torch.autograd.grad(
                loss(output)[0], output, allow_unused=True, materialize_grads=True
            )
            seen.tensors["weights"] = weights.detach().double().view(seen.tensors["labels"].shape)
    return seen


@contextmanager
def _replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block a call of `module` is one of `forward`."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


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
        given = bound.arguments
        tokens = next((name for name in TOKENS if isinstance(given.get(name), Tensor)), None)
        if tokens is None:
            raise _LayersBegin
        seen.tensors |= {
            name: given[name].detach() for name in NAMES if isinstance(given.get(name), Tensor)
        }
        seen.tensors["tokens"] = given[tokens].detach()
        if "labels" in seen.tensors and getattr(model.config, "mtp_num_layers", None):
            seen.tensors["next"] = _next_labels(
                seen.tensors["labels"], given.get("packed_seq_params")
            )
        seen.tensors |= _rotary_of_layers(
            model, given.get("packed_seq_params"), seen.tensors["tokens"].shape[1]
        )
        given[tokens] = given[tokens] % vocabulary
        _run_to_layers(model, functools.partial(forward, *bound.args, **bound.kwargs), seen)
        if "labels" not in seen.tensors:
            raise _LayersBegin
        return torch.ones(
            seen.tensors["labels"].shape, device=given[tokens].device, requires_grad=True
        )

    with _replaced_forward(model, record):
        yield


def _run_to_layers(model: Any, forward: Callable[[], Any], seen: Seen) -> None:
    """Runs the forward pass as far as the first layer, which gets the embeddings of tokens and
    positions.
    """
    layers, embedding = getattr(model, "decoder", None), getattr(model, "embedding", None)
    if layers is None or embedding is None:
        return

    def begin(hidden_states: Any = None, *args: Any, **kwargs: Any) -> None:
        rotary = kwargs.get("rotary_pos_emb")
        found = {
            "embedded": hidden_states,
            "rotary": rotary[0] if isinstance(rotary, tuple) else rotary,
        }
        seen.tensors.update(
            {name: x.detach() for name, x in found.items() if isinstance(x, Tensor)}
        )
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
        stack.enter_context(_replaced_forward(layers, begin))
        if not getattr(embedding, "add_position_embedding", True):
            stack.enter_context(_replaced_forward(embedding, empty))
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
    attention = [module for module in model.modules() if hasattr(module, "core_attention")]
    make = next(
        (
            module.rotary_pos_emb
            for module in attention
            if getattr(module, "rotary_pos_emb", None) is not None
        ),
        None,
    )
    if make is None:
        return {}
    rotary = make(s * compat.group_of(None, "cp").size())
    return {"rotary": rotary[0] if isinstance(rotary, tuple) else rotary}


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
    if "tokens" not in ours.tensors or "tokens" not in truth.tensors:
        return []
    layer = f"microbatch of {'x'.join(map(str, truth.tensors['tokens'].shape))} tokens"
    probes = [
        _probe(
            "token",
            ours.tensors["tokens"],
            truth.tensors["tokens"].gather(1, positions),
            positions,
            (layer, mask),
        )
    ]
    for name, shown in NAMES.items():
        mine, whole = ours.tensors.get(name), truth.tensors.get(name)
        if mine is None or whole is None or mine.shape != positions.shape or whole.dim() != 2:
            # a model gets whole positions where it splits them by itself, as those of several axes
            continue
        expected = whole.gather(1, positions)
        if name == "weights":
            # Megatron, or the loss function, divides by numbers of tokens: the tiny model shows
            # whether by the right ones.
            mine, expected = (x / x.sum() if x.sum() else x for x in (mine, expected))
        probes.append(_probe(shown, mine, expected, positions, (layer, mask)))
    for name, shown in WHOLE.items():
        mine, whole = ours.tensors.get(name), truth.tensors.get(name)
        if mine is None or whole is None or len(whole) <= int(positions.max()):
            # a table of packed documents ends with the longest; the loss tells where only one side
            # has documents
            continue
        if len(mine) == positions.shape[1]:
            probes.append(_probe_of_embeddings(shown, mine, whole, positions, (layer, mask)))
    return probes


def compare_declared(truth: Seen, data: dict[str, Any], mask: str) -> list[Probe]:
    """What whole batch rows have at context parallel size 1 against the batch itself: a fault of
    the forward step is the same at any size. Tokens whose loss mask is 0 have no weight; the step
    may leave out more. Those with a weight have their own label.
    """
    labels, weights = (truth.tensors.get(name) for name in ("labels", "weights"))
    if labels is None or weights is None or labels.shape != data["labels"].shape:
        return []
    about = f"microbatch of {'x'.join(map(str, labels.shape))} tokens", mask
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
    wrong = ~((mine - expected).abs() <= tolerance)
    where = ""
    if wrong.any():
        batch_row, token = (int(x) for x in wrong.nonzero()[0])
        place = f"token {int(positions[batch_row, token])} of batch row {batch_row}"
        values = f"{mine[batch_row, token]:.6g}, {source} {expected[batch_row, token]:.6g}"
        where = f"rank {dist.get_rank()}: {place} has {values}"
    return Probe(name, *about, float(wrong.sum()), 0.0, where, "tokens")


def _probe_of_embeddings(
    name: str, mine: Tensor, whole: Tensor, positions: Tensor, about: tuple[str, str]
) -> Probe:
    """Tokens whose embedding, of this rank [s, b or 1, ...] and of whole batch rows [n, b or 1,
    ...], differs.
    """
    places = positions.T.to(whole.device)  # [s, b]
    mine, whole = (x.flatten(2) for x in (mine, whole))
    batch_rows = max(mine.shape[1], whole.shape[1])
    wrong = torch.zeros(len(mine), batch_rows, dtype=torch.bool, device=mine.device)
    for batch_row in range(batch_rows):
        expected = whole[places[:, batch_row], batch_row if whole.shape[1] > 1 else 0]
        wrong[:, batch_row] = (mine[:, batch_row if mine.shape[1] > 1 else 0] != expected).any(1)
    where = ""
    if wrong.any():
        token, batch_row = (int(x) for x in wrong.nonzero()[0])
        where = (
            f"rank {dist.get_rank()}: token {int(places[token, batch_row])} of batch row "
            f"{batch_row} has another than at cp 1"
        )
    return Probe(name, *about, float(wrong.sum()), 0.0, where, "tokens")


def uncovered(seen: Seen) -> list[str]:
    """What the observed microbatch does not show, in words."""
    if "tokens" not in seen.tensors:
        return ["the microbatch at the job's own length (the model takes no input_ids)"]
    missing = [
        what
        for name, what in (("labels", "labels"), ("weights", "weights of tokens"))
        if name not in seen.tensors
    ]
    return (
        [
            f"{' and '.join(missing)} at the job's own length (the forward step does not pass them "
            "on)"
        ]
        if missing
        else []
    )
