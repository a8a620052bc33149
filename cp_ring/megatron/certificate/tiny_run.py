"""Runs the forward step of the job with a tiny model of the job: as the job trains, and in the
reference run, at context parallel size 1, with whole batch rows and a dense mask in float64.

In the reference run Mamba and gated delta net layers run each document separately, so no state can
cross into another document.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.microbatch_mask import KEY
from cp_ring.megatron.adapter.rotary import positions_in_force
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.dense_oracle import MaskRule, attend_whole_rows
from cp_ring.megatron.certificate.layer_kinds import declared_scale, declared_window
from cp_ring.megatron.certificate.tiny_model import (
    arguments_in_force,
    arguments_of_microbatch,
    attention_layers,
    build,
    one_stage,
    with_changes,
)
from cp_ring.megatron.wrapping import loaded_modules, replaced

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]

MICROBATCHES = 2


def is_own(step: ForwardStep | None) -> bool:
    """Return True if `step` is None or the forward step of `cp_ring.pretrain_gpt`, not a script's
    own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


@dataclass(frozen=True)
class Outcome:
    """The results of a step: losses of this rank's tokens [b, s], with the batch rows of all
    microbatches, the reported loss, and gradients by parameter.

    `sums` is true if the loss function returns a number of tokens and reports a sum and a number,
    which Megatron adds up over ranks. Megatron averages a mean over ranks.
    """

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]
    sums: bool


@dataclass
class TinyRun:
    """The forward step of the job with a tiny model; that of the job's own script, because it may
    compute another loss than Megatron's.

    Attributes:
        args: the arguments in force: of the tiny model or, for a pipeline stage, of the job.
        state: values of Megatron's parallel state.
        whole: True in the reference run.
        model: the tiny model.
    """

    step: ForwardStep
    args: argparse.Namespace
    state: dict[str, Any]
    whole: bool
    model: Any = None

    @contextmanager
    def in_force(self, batch: Batch) -> Iterator[tuple[Batch, argparse.Namespace]]:
        """Put the arguments and groups of this run on `batch` in force; yield the batch that the
        step reads, and the arguments.
        """
        args = with_changes(self.args, arguments_of_microbatch(batch))
        rows: AbstractContextManager[None] = nullcontext()
        if self.whole:
            if is_own(self.step) and len(batch.items) == 1:
                # needs no code of declared masks for a drawn microbatch
                item = {name: x for name, x in batch.items[0].items() if name != KEY}
                batch = replace(batch, items=[item])
            rows = _whole_rows_in_force(batch.rules, KEY in batch.items[0])
        with arguments_in_force(args, self.state), rows:
            yield batch, args

    def observe(
        self, batch: Batch, seed: int, item: int = 1, before: batch_probe.Seen | None = None
    ) -> batch_probe.Seen:
        """Return what the step makes of this one of the items of `batch`; see
        `batch_probe.observe`.
        """
        with self.in_force(batch) as (given, _):
            data = given.delivered(seed, item)
            return batch_probe.observe(self.model, self.step, data, before)

    def observe_stages(
        self, job: argparse.Namespace, batch: Batch, seed: int, before: batch_probe.Seen
    ) -> list[batch_probe.Seen]:
        """Return what the step gives each virtual pipeline stage of this rank, where a whole model
        gets `before`; [] without pipeline stages, and for unknown models.
        """
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1 or "embedded" not in before:
            return []
        virtual, seen = parallel_state.get_virtual_pipeline_model_parallel_world_size(), []
        for stage in range(virtual) if virtual else [None]:
            state = {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": stage}
            run = replace(self, args=job, state=state)
            with replaced((self.model, "vp_stage", stage)):
                seen.append(run.observe(batch, seed, 2 + (stage or 0), before))
        return seen

    def train(self, batch: Batch, seed: int) -> Outcome:
        """Train one step on two microbatches drawn like `batch`: run forward, backward and the
        reduction of gradients, as Megatron's training loop does. Labels that the loss mask hides
        are others than in the reference run.
        """
        seeds = range(seed, seed + MICROBATCHES)
        with self.in_force(batch) as (given, args):
            items = [given.trained(each, blind=not self.whole) for each in seeds]
            return _train(args, self.model, items, self.step)


def tiny_runs(tiny: argparse.Namespace, batch: Batch, step: Any, alone: Any) -> list[TinyRun]:
    """Return the run of a tiny model as the job trains it, and the reference run with the same
    weights, which follows the rules of `batch`. None stands for the forward step of
    `cp_ring.pretrain_gpt`, `alone` is a process group of this rank only.
    """
    if is_own(step):
        from cp_ring.megatron.gpt import forward_step as step  # imports Megatron
    single = {"context_parallel_size": 1, "recompute_granularity": None}
    runs = []
    for whole, args in enumerate((tiny, with_changes(tiny, single))):
        runs.append(TinyRun(step, args, one_stage(alone, bool(whole)), bool(whole)))
        with runs[whole].in_force(batch) as (_, given):
            runs[whole].model = build(given)
    runs[True].model.load_state_dict(runs[False].model.state_dict())
    _follow_rules(runs[True].model, batch.rules)
    return runs


def _train(
    args: argparse.Namespace, model: Any, microbatches: list[dict[str, Any]], step: ForwardStep
) -> Outcome:
    """Run forward, backward and the reduction of gradients on `microbatches`, as Megatron's
    training loop does.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    batch_size, n = microbatches[0]["tokens"].shape
    seen: list[Tensor] = []
    returned: set[int] = set()

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().reshape(batch_size, -1).double())

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = loss(*args, **kwargs)
            returned.add(len(outputs))
            return outputs

        return output, counted

    average = getattr(args, "ddp_average_in_collective", False)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=average)
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.model_type = ModelType.encoder_or_decoder
    wrapped.zero_grad_buffer()
    reports = forward_backward_no_pipelining(
        forward_step_func=observed,
        data_iterator=iter(microbatches),
        model=[wrapped],
        num_microbatches=len(microbatches),
        seq_length=n,
        micro_batch_size=batch_size,
        forward_only=False,
    )
    wrapped.grad_accs.clear()  # breaks a cycle through autograd, which would keep the model
    report = sum(next(iter(each.values())).detach().double().reshape(-1) for each in reports)
    dist.all_reduce(
        report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    gradients = {
        name: parameter.main_grad.detach().double().clone()
        for name, parameter in wrapped.module.named_parameters()
    }
    sums = len(report) == 2 and returned == {3}
    return Outcome(torch.cat(seen), float(report[0] / report[-1]), gradients, sums)


def _follow_rules(model: Any, rules: list[MaskRule]) -> None:
    """Make the layers of the reference run follow the flags: dense masks in place of the ring, and
    recurrent layers document by document.
    """
    scale = declared_scale(model.config)[0]
    paths = [_paths(rule) for rule in rules]
    for layer in attention_layers(model):
        window = declared_window(model.config, layer.core_attention.layer_number)
        core = layer.core_attention
        sink = getattr(core, "softmax_offset", None)
        core.forward = functools.partial(attend_whole_rows, rules, window, scale, sink)
    for module in model.modules():
        if any(len(of_row) > 1 for of_row in paths) and hasattr(module, "cp_ring_group"):
            module.forward = functools.partial(_by_document, module.forward, paths)


def _paths(rule: MaskRule) -> list[tuple[Tensor, int]]:
    """Return for each document or branch of a batch row the tokens that its last token sees, and
    how many of them are its own, the last ones. Padding, which sees nothing, is a document too.
    """
    every = torch.arange(len(rule.last))
    real = rule.sees(every, every)
    goes_on = ~rule.last[:-1] & (rule.positions.diff() == 1) | ~(real[1:] | real[:-1])
    found = []
    start = 0
    for end in [*((~goes_on).nonzero()[:, 0] + 1).tolist(), len(every)]:
        seen = rule.sees(torch.tensor([[end - 1]]), every[None])[0].nonzero()[:, 0]
        found.append((seen if len(seen) else every[start:end], end - start))
        start = end
    return found


def _by_document(
    forward: Callable[..., Any],
    paths: list[list[tuple[Tensor, int]]],
    hidden: Tensor,
    *args: Any,
    **named: Any,
) -> tuple[Tensor, Any]:
    """Run the layer's `forward` on batch rows [n, b, h], one document or branch at a time behind
    all that comes before it, without the documents that `named` may hold.
    """
    named.pop("packed_seq_params", None)
    columns = []
    bias = None
    for batch_row, of_row in zip(hidden.split(1, 1), paths, strict=True):
        outputs = []
        for path, own in of_row:
            out, bias = forward(batch_row[path], *args, **named)
            outputs.append(out[-own:])
        columns.append(torch.cat(outputs))
    return torch.cat(columns, 1), bias


@contextmanager
def _whole_rows_in_force(rules: list[MaskRule], declares: bool) -> Iterator[None]:
    """Put cp_ring's settings of the reference run in force: batch rows in order, and multi-token
    prediction inside the declared documents.

    Rotary embeddings follow declared positions, and those of documents that a layout balances. The
    kinds of masks stay set if the batch `declares` masks, which a step reads.
    """
    last = torch.stack([rule.last for rule in rules])
    places = None
    if in_force().by_microbatch:
        ids = torch.stack([rule.positions for rule in rules], 1)
        places = ids, torch.arange(len(ids))[:, None].expand_as(ids)

    def roll(tensor: Any, *rest: Any, **named: Any) -> Any:
        if tensor is None:
            return None, None
        ends = last.to(tensor.device).view(tensor.shape)
        rolled = tensor.roll(-1, -1).masked_fill(ends, 0)
        return rolled, rolled.sum()

    modules = loaded_modules("megatron.core")
    rolls = ((each, "roll_tensor", roll) for each in modules if "roll_tensor" in vars(each))
    used = settings.current()
    kinds = used.mask_kinds if declares else ""
    plain = replace(used, layout="zigzag", document_mask=False, mask_kinds=kinds, loss_chunk=0)
    with replaced(*rolls), positions_in_force(places), settings.in_force(plain):
        yield
