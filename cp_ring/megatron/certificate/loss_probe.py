"""Probe of a tiny model made from the job's flags: losses and gradients of one microbatch, against
context parallel size 1.

The model takes one training step's forward and backward as the job does: the job's split of the
batch, its forward step and loss, Megatron's schedule, DistributedDataParallel and reduction of
gradients. Its twin has the same weights, holds whole batch rows, and attends by a dense mask in
float64. Both compute in float32, so that they differ in context parallelism alone.

With --cp-ring-stock-loss-average, or where the loss function returns a mean, Megatron averages the
mean losses of the ranks, so a token on a rank where few tokens count weighs more than one
elsewhere. The twin then gives each token that weight.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.dense_oracle import DenseAttention, MaskRule, Spans
from cp_ring.megatron.certificate.isolation import attempting
from cp_ring.megatron.certificate.layer_kinds import LayerKind, declared_scale, declared_window
from cp_ring.megatron.certificate.probe_batch import SplitBatch
from cp_ring.megatron.certificate.recurrent_twin import run_by_document
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.routing import routed_by_rank
from cp_ring.megatron.certificate.tiny_batch import Microbatch, rank_positions
from cp_ring.megatron.certificate.tiny_model import (
    VOCABULARY,
    arguments_in_force,
    build,
    name_of,
    one_rank,
    one_stage,
    own_device,
    tiny_args,
    with_changes,
)
from cp_ring.megatron.certificate.training_step import (
    ForwardStep,
    Outcome,
    compare,
    compare_blind,
    train,
)
from cp_ring.megatron.layers.rotary import positions_in_force
from cp_ring.megatron.wrapping import loaded_modules, replaced

MOST_TOKENS = 1 << 20  # of a microbatch of the job's own length


def is_own(step: ForwardStep | None) -> bool:
    """Whether `step` is the forward step of `cp_ring.pretrain_gpt`, also for None, and not a
    script's own.
    """
    from cp_ring.megatron import gpt  # imports Megatron

    return step is None or getattr(step, "__module__", "") == gpt.__name__


def probe_loss(
    args: argparse.Namespace,
    kinds: list[LayerKind],
    alone: Any,
    step: ForwardStep | None,
    seed: int,
) -> tuple[list[Probe], list[str]]:
    """Losses, loss and gradients of the tiny model of `args`, whose layers are `kinds`, and a
    microbatch of the job's length.

    Every rank of the job calls it. `alone` is a process group of this rank only, `step` the job's
    forward step: that of `cp_ring.pretrain_gpt`, also for None, or a script's own, which then runs
    at context parallel size 1 too, because it may have a loss of its own. Returns the probes and
    what they do not cover.
    """
    own = not hasattr(args, "transformer_config") and is_own(step)
    if own or step is None:
        from cp_ring.megatron.gpt import forward_step  # imports Megatron

        step = forward_step
    step = _in_words(step)
    theirs = _whole_rows if own else step
    batch, positions = _drawn(args, kinds[0], seed)
    tiny = tiny_args(args, kinds, len(batch.spans))
    whole = with_changes(tiny, {"context_parallel_size": 1})
    long = _long_kind(args, kinds[0])
    long_batch, long_positions = _drawn(args, long, seed, distinct=True)
    with ExitStack() as done, arguments_in_force(tiny, one_stage(alone)):
        with attempting("no tiny model can be built from the job's flags"):
            model = build(tiny)
        done.callback(_without_groups, model)
        name = name_of(tiny, model)
        with arguments_in_force(with_changes(tiny, _sizes(long)), one_stage(alone)):
            seen = batch_probe.observe(model, step, long_batch.fresh(), VOCABULARY)
        (ours,) = train(tiny, model, batch, step)
        (blind,) = train(tiny, model, batch.blind(), step)
        # whose mean losses Megatron averages as they are
        stock = settings.current().stock_loss_average or ours.tokens is None
        by_rank = stock and not args.calculate_per_token_loss
        weights = [_weights(batch, positions, _counts_of_ranks(ours))] if by_rank else []
    with arguments_in_force(whole, one_rank(alone)), _whole_rows_in_force(batch, own):
        twin = build(whole)
        twin.load_state_dict(model.state_dict())
    with ExitStack() as done:
        done.callback(_without_groups, twin)
        with (
            arguments_in_force(with_changes(whole, _sizes(long)), one_rank(alone)),
            _whole_rows_in_force(long_batch, own),
        ):
            truth = batch_probe.observe(twin, theirs, long_batch.fresh(), VOCABULARY)
        with (
            arguments_in_force(whole, one_rank(alone)),
            _whole_rows_in_force(batch, own),
            routed_by_rank(whole, positions),
        ):
            _attend_densely(twin, batch.spans)
            run_by_document(twin, batch.spans)
            plain, *weighted = train(whole, twin, batch, theirs, None, *weights)
    twins = plain, weighted[0] if weighted else plain
    rank = compat.group_of(None, "cp").rank()
    found = compare(ours, twins, own, positions[rank].to(own_device()), (name, kinds[0].mask))
    found.append(compare_blind(ours, blind, (name, kinds[0].mask)))
    found += batch_probe.compare(seen, truth, long_positions[rank].to(own_device()), long.mask)
    found += batch_probe.compare_declared(truth, long_batch.data, long.mask)
    return found, batch_probe.uncovered(seen) + _unseen(args, long)


def _long_kind(args: argparse.Namespace, kind: LayerKind) -> LayerKind:
    """The microbatch of the job's own length: as many batch rows as the job has, or as
    `MOST_TOKENS` allow.
    """
    n = args.seq_length or kind.tokens
    if kind.mask == "packed" and not settings.packed_in_whole_rows():
        n -= n % (4 * args.context_parallel_size)
    batch = 1 if kind.mask == "packed" else max(1, min(args.micro_batch_size, MOST_TOKENS // n))
    return replace(kind, tokens=n, batch_size=batch)


def _sizes(kind: LayerKind) -> dict[str, int]:
    return {
        "seq_length": kind.tokens,
        "max_position_embeddings": kind.tokens,
        "micro_batch_size": kind.batch_size,
    }


def _unseen(args: argparse.Namespace, long: LayerKind) -> list[str]:
    """What the microbatch of the job's own length leaves out, in words."""
    if not args.seq_length:
        return ["the microbatch at the job's own length (enable(seq_length=...) tells it)"]
    if long.mask == "packed" or long.batch_size == args.micro_batch_size:
        return []
    return [
        f"labels and weights of {args.micro_batch_size - long.batch_size} of "
        f"{args.micro_batch_size} batch rows"
    ]


def _drawn(
    args: argparse.Namespace, kind: LayerKind, seed: int, distinct: bool = False
) -> tuple[Microbatch, list[Tensor]]:
    """A microbatch, and where the tokens of each context-parallel rank are in it [b, s]."""
    cp = args.context_parallel_size
    batch = Microbatch.draw(kind, seed, cp, distinct)
    positions = [rank_positions(batch, kind, of_rank, cp, split_of(args)) for of_rank in range(cp)]
    batch.counted(positions)
    return batch, positions


def _in_words(step: ForwardStep) -> ForwardStep:
    """The forward step and its loss function; their errors say what was called, and with what."""
    function = getattr(step, "func", step)  # of a partial
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""
    name = f"{getattr(function, '__name__', type(function).__name__)}{place}"

    def called(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        with attempting(
            f"{name} could not be called with a microbatch of tokens, labels, loss_mask and "
            "position_ids"
        ):
            output, loss = step(iterator, model)

        def loss_in_words(*args: Any, **kwargs: Any) -> Any:
            with attempting(
                f"the loss function of {name} could not be called with the losses of tokens"
            ):
                return loss(*args, **kwargs)

        return output, loss_in_words

    return called


def _counts_of_ranks(ours: Outcome) -> list[float] | None:
    """How many tokens count on each context-parallel rank by a script's own loss function, which
    may change the loss mask.
    """
    group = compat.group_of(None, "cp")
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, ours.tokens, group=group)
    return None if None in counts else [max(count, 1.0) for count in counts]


def _weights(batch: Microbatch, positions: list[Tensor], tokens: list[float] | None) -> Tensor:
    """How much each token weighs [b, n] where the mean losses of ranks are averaged, relative to a
    mean over all tokens.

    `tokens` is how many tokens count on each rank, by default as many as the loss mask says.
    """
    mask = batch.data["loss_mask"]
    counts = tokens or [float(mask.gather(1, of_rank).sum().clamp(min=1)) for of_rank in positions]
    weights = torch.empty_like(mask)
    for of_rank, count in zip(positions, counts, strict=True):
        weights.scatter_(
            1, of_rank, torch.full(of_rank.shape, sum(counts) / (len(positions) * count))
        )
    return weights


def split_of(args: argparse.Namespace) -> SplitBatch:
    """How the job splits batch rows without documents over the context-parallel ranks."""
    if hasattr(args, "transformer_config"):
        from cp_ring.megatron import batches  # imports Megatron

        return batches.on_this_cp_rank
    # imports Megatron, and its training loop, which users of megatron.core alone may lack
    from cp_ring.megatron import gpt

    return gpt.on_this_cp_rank


def _without_groups(model: Any) -> None:
    """Takes the process groups from a model that is done: Megatron's caches keep some of its
    modules, and groups must close.
    """
    for module in model.modules():
        for name in [
            name for name, value in vars(module).items() if isinstance(value, dist.ProcessGroup)
        ]:
            delattr(module, name)


def _whole_rows(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """The forward step of the twin: whole batch rows, no packing; the sum of the losses that count,
    and their number.
    """
    batch = {
        name: tensor.to(own_device())
        for name, tensor in next(iterator).items()
        if isinstance(tensor, Tensor)
    }
    mask = batch["loss_mask"]
    more = {"loss_mask": mask} if compat.takes(model, "loss_mask") else {}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **more)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (losses.reshape(-1).float() * mask.reshape(-1)).sum(), mask.sum()
        return (
            total,
            count.detach().to(torch.int),
            {"lm loss": torch.stack([total.detach(), count])},
        )

    return output, loss


def _attend_densely(model: Any, spans: list[Spans | MaskRule]) -> None:
    """Replaces ring attention in every layer of the twin by dense attention with the mask that the
    flags declare.
    """
    from cp_ring.megatron.ring_core_attention import RingDotProductAttention  # imports Megatron

    scale = declared_scale(model.config)[0]
    for module in model.modules():
        ring = getattr(module, "core_attention", None)
        if isinstance(ring, RingDotProductAttention):
            module.core_attention = DenseAttention(
                ring, declared_window(model.config, ring.layer_number), scale, spans
            )


@contextmanager
def _whole_rows_in_force(batch: Microbatch, own: bool) -> Iterator[None]:
    """cp_ring's settings of the twin, batch rows in order; multi-token prediction stays within the
    declared documents.

    Rotary embeddings are those of the declared positions. A script's own step, if not `own`, may
    need the kinds of masks.
    """
    last = batch.last()

    def roll(
        tensor: Tensor | None, shifts: int = -1, dims: int = -1, *rest: Any, **named: Any
    ) -> Any:
        if tensor is None:
            return None, None
        rolled = torch.roll(tensor, -1, -1).masked_fill(
            last.to(tensor.device).view(tensor.shape), 0
        )
        return rolled, rolled.sum()

    before = settings.current()
    loaded = loaded_modules("megatron.core")
    with ExitStack() as stack:
        stack.enter_context(
            replaced(
                *(
                    (module, "roll_tensor", roll)
                    for module in loaded
                    if "roll_tensor" in vars(module)
                )
            )
        )
        stack.enter_context(positions_in_force(batch.selected()))
        kinds = "" if own else before.mask_kinds
        alone = replace(
            before, layout="zigzag", document_mask=False, mask_kinds=kinds, loss_chunk=0
        )
        settings.configure(alone)
        stack.callback(functools.partial(settings.configure, before))
        yield
