"""Probe of a tiny model made from the job's flags: losses and gradients of one microbatch, against
context parallel size 1.

The model takes one training step's forward and backward as the job does: the job's split of the
batch, its forward step and loss, Megatron's schedule, DistributedDataParallel and reduction of
gradients. Its twin has the same weights, holds whole batch rows, and attends by a dense mask in
float64. Both compute in float32, so that they differ in context parallelism alone.

Without --calculate-per-token-loss Megatron averages the mean losses of the ranks, so a token on a
rank where few tokens count weighs more than one elsewhere. The twin then gives each token that
weight.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.declared import PREFIX
from cp_ring.megatron.certificate.isolation import attempting, replaced
from cp_ring.megatron.certificate.layer_kinds import LayerKind, declared_scale, declared_window
from cp_ring.megatron.certificate.oracle import DenseAttention, MaskRule, Spans
from cp_ring.megatron.certificate.probe_batch import (
    SplitBatch,
    declared_of_rows,
    documents_of_rows,
    packed_offsets,
    packed_positions,
    random_offsets,
    samples_of_rows,
    spans_between,
)
from cp_ring.megatron.certificate.recurrent_twin import run_by_document
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.routing import routed_by_rank
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
from cp_ring.megatron.masks import KEY
from cp_ring.megatron.rotary import positions_in_force
from cp_ring.plan.sizes import widening

# Norms of errors over norms of the truth; on CUDA matrix products may round to TF32.
BOUND = {"cpu": 1e-4, "cuda": 1e-2}

MOST_TOKENS = 1 << 20  # of a microbatch of the job's own length

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]


@dataclass(frozen=True)
class Microbatch:
    """Whole batch rows [b, n] as a data set gives them, and the documents of each, or the rule of
    the mask that it declares.
    """

    data: dict[str, Any]
    spans: list[Spans | MaskRule]

    @classmethod
    def draw(cls, kind: LayerKind, seed: int, cp: int, distinct: bool = False) -> Microbatch:
        """Random tokens, in documents where the mask of `kind` has them; the loss mask differs
        between ranks, and has fractions.

        With `distinct` each token is another, beyond any vocabulary.
        """
        random = torch.Generator().manual_seed(seed)
        if kind.mask.startswith(PREFIX):
            return cls._declared(kind, random, distinct)
        n, documents = kind.tokens, kind.mask != "causal"
        offsets = [
            random_offsets(n, 3 if documents else 0, number)
            for number in range(1, kind.batch_size + 1)
        ]
        offsets = [packed_offsets(n, cp)] if kind.mask == "packed" else offsets
        spans = [spans_between(of_row) for of_row in offsets]
        tokens = _tokens(len(spans), n + 1, random, distinct)
        mask = _loss_mask(len(spans), n, random)
        positions = torch.empty(len(spans), n, dtype=torch.int64)
        for batch_row, of_row in enumerate(spans):
            for start, end in of_row:
                positions[batch_row, start:end] = torch.arange(end - start)
                mask[batch_row, end - 1] *= not documents
        data = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": positions,
        }
        data |= {"loss_mask": mask}
        if kind.mask == "packed":  # as the data sets of Megatron's scripts have it
            data["cu_seqlens"] = torch.from_numpy(offsets[0])[None].to(torch.int32)
            data["max_seqlen"] = torch.tensor([int(np.diff(offsets[0]).max())], dtype=torch.int32)
        return cls(data, list(spans))

    @classmethod
    def _declared(cls, kind: LayerKind, random: torch.Generator, distinct: bool) -> Microbatch:
        """Batch rows that carry samples of a declared mask."""
        masks, rules = samples_of_rows(kind)
        n = kind.tokens
        tokens = _tokens(len(rules), n + 1, random, distinct)
        weights = _loss_mask(len(rules), n, random)
        data = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": weights,
        }
        positions = torch.stack([rule.positions for rule in rules])
        return cls(data | {"position_ids": positions, KEY: masks}, list(rules))

    def counted(self, positions: list[Tensor]) -> None:
        """Makes the loss mask of each rank, whose tokens are at `positions`, add up to a whole
        number.

        Loss functions of Megatron's scripts cut off fractions of this number, with and without
        context parallelism.
        """
        mask = self.data["loss_mask"]
        for of_rank in positions:
            part = mask.gather(1, of_rank)
            places = part.nonzero()
            if len(places):
                batch_row, token = (int(x) for x in places[-1])
                mask[batch_row, of_rank[batch_row, token]] += (
                    -float(part.sum(dtype=torch.float64)) % 1
                )

    def fresh(self) -> dict[str, Any]:
        """A copy of the data: a script may write into the dictionary and the tensors that it gets."""
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.data.items()
        }

    def selected(self) -> tuple[Tensor, Tensor] | None:
        """Positions and places of the tokens of whole batch rows [n, b], where positions are
        declared.
        """
        rules = [rule for rule in self.spans if isinstance(rule, MaskRule)]
        if not rules:
            return None
        positions = torch.stack([rule.positions for rule in rules], 1)
        return positions, torch.arange(len(positions))[:, None].expand_as(positions)

    def last(self) -> Tensor:
        """True for the last token of each document or declared sequence, bool [b, n]."""
        last = torch.zeros(self.data["tokens"].shape, dtype=torch.bool)
        for batch_row, spans in enumerate(self.spans):
            if isinstance(spans, MaskRule):
                last[batch_row] = spans.last()
            else:
                last[batch_row, [end - 1 for _, end in spans]] = True
        return last


def _tokens(batch: int, n: int, random: torch.Generator, distinct: bool) -> Tensor:
    if distinct:
        return torch.arange(batch * n).view(batch, n)
    return torch.randint(VOCABULARY, (batch, n), generator=random)


def _loss_mask(batch: int, n: int, random: torch.Generator) -> Tensor:
    """Zeros, and weights of up to 1.75 in quarters, which become more often along the sequence:
    float32 [batch, n].
    """
    some = torch.rand(batch, n, generator=random) < torch.linspace(0.4, 1.0, n)
    return some * torch.randint(1, 8, (batch, n), generator=random) / 4


@dataclass(frozen=True)
class Outcome:
    """The results of a step: losses of this rank's tokens [b, s], the reported loss, gradients by
    parameter.

    `sums` tells whether the loss function reports a sum and a number of tokens, which are added up
    over ranks, and not a mean. `tokens` is the number of tokens that it returns, if it does.
    """

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]
    sums: bool
    tokens: float | None = None


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
    step = _in_words(_own_step() if own or step is None else step)
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
        (ours,) = _train(tiny, model, batch, step)
        counts = None if own else _counts_of_ranks(ours)
    weights = [] if args.calculate_per_token_loss else [_weights(batch, positions, counts)]
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
            plain, *weighted = _train(whole, twin, batch, theirs, None, *weights)
    twins = plain, weighted[0] if weighted else plain
    rank = _rank()
    found = _compare(ours, *twins, own, positions[rank].to(own_device()), (name, kinds[0].mask))
    found += batch_probe.compare(seen, truth, long_positions[rank].to(own_device()), long.mask)
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
    positions = [_positions(batch, kind, of_rank, cp, split_of(args)) for of_rank in range(cp)]
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


def _own_step() -> ForwardStep:
    from cp_ring.megatron.gpt import forward_step  # imports Megatron

    return forward_step


def _rank() -> int:
    from megatron.core import parallel_state  # heavy, and installed with Megatron only

    return int(parallel_state.get_context_parallel_rank())


def _counts_of_ranks(ours: Outcome) -> list[float] | None:
    """How many tokens count on each context-parallel rank by a script's own loss function, which
    may change the loss mask.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
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


def _compare(
    ours: Outcome,
    plain: Outcome,
    weighted: Outcome,
    own: bool,
    positions: Tensor,
    about: tuple[str, str],
) -> list[Probe]:
    """The job's outcome against its twin's: `weighted` has the gradients of averaged means, `plain`
    those of one mean.

    A script may average either way, so that its gradients are compared with both. `about` names the
    model and its mask.
    """
    (model, mask), rank = about, f"rank {dist.get_rank()}"
    bound = BOUND["cuda" if ours.losses.is_cuda else "cpu"] + widening(settings.current().wire)
    truth = plain.losses.gather(1, positions)
    difference = ours.losses - truth
    batch_row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), truth.shape[1])
    place = f"{rank}: worst at query {int(positions[batch_row, token])} of batch row {batch_row}"
    possible = [weighted] if own else [weighted, plain]
    worst, error, ratio = min(
        (_compare_gradients(ours, one) for one in possible), key=lambda result: _number(result[1])
    )
    expected = [plain] if ours.sums else possible
    loss = min(
        (one.loss for one in expected), key=lambda value: _number(abs(ours.loss / value - 1))
    )
    return [
        Probe(
            "loss of each token", model, mask, float(difference.norm() / truth.norm()), bound, place
        ),
        Probe(
            "loss",
            model,
            mask,
            abs(ours.loss / loss - 1),
            bound,
            f"{rank}: {ours.loss:.6g}, at cp 1 {loss:.6g}",
        ),
        Probe(
            "gradient norm",
            model,
            mask,
            abs(ratio - 1),
            bound,
            f"{rank}: {ratio:.6g} of that at cp 1",
        ),
        Probe("gradients", model, mask, error, 10 * bound, f"{rank}: worst in {worst}"),
    ]


def _compare_gradients(ours: Outcome, wanted: Outcome) -> tuple[str, float, float]:
    """The parameter whose gradient is worst, its error relative to its norm, and the ratio of the
    norms of all gradients.
    """
    norms = [
        torch.stack([x.norm() for x in outcome.gradients.values()]).norm()
        for outcome in (ours, wanted)
    ]
    least = float(norms[1]) * 1e-2
    errors = {
        name: float((ours.gradients[name] - gradient).norm() / gradient.norm().clamp(min=least))
        for name, gradient in wanted.gradients.items()
    }
    worst = max(errors, key=lambda name: _number(errors[name]))
    return worst, errors[worst], float(norms[0] / norms[1])


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def split_of(args: argparse.Namespace) -> SplitBatch:
    """How the job splits batch rows without documents over the context-parallel ranks."""
    if hasattr(args, "transformer_config"):
        from cp_ring.megatron import batches  # imports Megatron

        return batches.on_this_cp_rank
    # imports Megatron, and its training loop, which users of megatron.core alone may lack
    from cp_ring.megatron import gpt

    return gpt.on_this_cp_rank


def _positions(batch: Microbatch, kind: LayerKind, rank: int, cp: int, split: SplitBatch) -> Tensor:
    """Where the tokens of a rank are in their batch rows, int64 [b, s], as the job's own split has
    them.
    """
    whole = torch.arange(kind.tokens).expand(len(batch.spans), -1)
    if kind.mask == "packed":
        return packed_positions(batch.data["cu_seqlens"][0].numpy().astype(np.int64), rank, cp)[
            None
        ]
    if kind.mask == "documents":
        spans = [spans for spans in batch.spans if not isinstance(spans, MaskRule)]
        return torch.as_tensor(documents_of_rows(spans, kind.tokens, cp).shard(whole, rank))
    if kind.mask.startswith(PREFIX):
        return torch.as_tensor(declared_of_rows(batch.data[KEY], cp).shard(whole, rank))
    return split({"tokens": whole}, rank, cp)["tokens"]


def _train(
    args: argparse.Namespace,
    model: Any,
    batch: Microbatch,
    step: ForwardStep,
    *weights: Tensor | None,
) -> list[Outcome]:
    """Forward, backward and reduction of gradients of one microbatch, as Megatron's training loop
    runs them.

    Once for each of `weights`, the factors [b, n] of the losses of tokens; None is 1.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType

    known = {
        "grad_reduce_in_fp32": True,
        "average_in_collective": getattr(args, "ddp_average_in_collective", False),
    }
    config = DistributedDataParallelConfig(
        **compat.known_fields(DistributedDataParallelConfig, known)
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.model_type = ModelType.encoder_or_decoder
    # a step may change them, as quantile balancing does
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    outcomes = []
    try:
        for factors in weights or (None,):
            outcomes.append(_train_once(wrapped, batch, step, factors))
            for buffer, before in buffers:
                buffer.copy_(before)
        return outcomes
    finally:
        # a cycle through autograd, which would keep the model and its groups alive
        wrapped.grad_accs.clear()


def _without_groups(model: Any) -> None:
    """Takes the process groups from a model that is done: Megatron's caches keep some of its
    modules, and groups must close.
    """
    for module in model.modules():
        for name in [
            name for name, value in vars(module).items() if isinstance(value, dist.ProcessGroup)
        ]:
            delattr(module, name)


def _train_once(
    wrapped: Any, batch: Microbatch, step: ForwardStep, weights: Tensor | None
) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    seen: list[Tensor] = []
    tokens: list[float] = []

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().clone())

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = loss(*args, **kwargs)
            tokens.extend([float(outputs[1])] if len(outputs) == 3 else [])
            return outputs

        return (output if weights is None else output * weights.to(output.device)), counted

    wrapped.zero_grad_buffer()
    batch_size, n = batch.data["tokens"].shape
    reports = forward_backward_no_pipelining(
        forward_step_func=observed, data_iterator=iter([batch.fresh()]), model=[wrapped], num_microbatches=1, seq_length=n,
        micro_batch_size=batch_size, forward_only=False,
    )  # fmt: skip
    report = next(iter(reports[0].values())).detach().clone().double().reshape(-1)
    sums = report.numel() == 2
    report = report if sums else torch.stack([report[0], torch.ones_like(report[0])])
    dist.all_reduce(
        report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    gradients = {
        name: parameter.main_grad.detach().double().clone()
        for name, parameter in wrapped.module.named_parameters()
    }
    losses = seen[0].reshape(batch_size, -1).double()
    return Outcome(
        losses, float(report[0] / report[1]), gradients, sums, tokens[0] if tokens else None
    )


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
    from cp_ring.megatron.core_attention import RingDotProductAttention  # imports Megatron

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
    loaded = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core") and module
    ]
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
