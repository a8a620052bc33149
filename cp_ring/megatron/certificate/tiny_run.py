"""Runs the forward step of the job with a tiny model of the job: as the job trains, and in the
reference run, at context parallel size 1, with whole batch rows and a dense mask in float64.

In the reference run Mamba and gated delta net layers run each document separately, so no state can
cross into another document.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from cp_ring.megatron.certificate.batch import Batch, vocabulary_of
from cp_ring.megatron.certificate.dense_oracle import MaskRule, attend_whole_rows
from cp_ring.megatron.certificate.layer_kinds import declared_scale, declared_window
from cp_ring.megatron.certificate.tiny_model import (
    arguments_in_force,
    arguments_of_microbatch,
    build,
    core_attentions,
    one_stage,
    with_changes,
)
from cp_ring.megatron.wrapping import ForwardStep, Function, loaded_modules, replaced

MICROBATCHES = 2


def is_own(step: ForwardStep | None) -> bool:
    """Return True if `step` is None or the forward step of `cp_ring.pretrain_gpt`, not a script's
    own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


@dataclass(frozen=True)
class Outcome:
    """The results of a step: losses of this rank's tokens [b, s] for each microbatch, the reported
    loss, and gradients by parameter.

    `sums` is true if the loss function returns a number of tokens and reports a sum and a number,
    which Megatron adds up over ranks. Megatron averages a mean over ranks.
    """

    losses: list[Tensor]
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
    def in_force(self, batch: Batch) -> Iterator[Batch]:
        """Put the arguments and groups of this run on `batch` in force; yield the batch that the
        step reads.
        """
        args = with_changes(self.args, arguments_of_microbatch(batch))
        if self.whole and is_own(self.step) and len(batch.items) == 1:
            # needs no code of declared masks for a drawn microbatch
            item = dict(batch.items[0])
            item.pop(KEY, None)
            batch = replace(batch, items=[item])
        rows = _whole_rows_in_force(self.model, batch) if self.whole else nullcontext()
        with arguments_in_force(args, self.state), rows:
            yield batch

    def observe(
        self, batch: Batch, seed: int, item: int = 1, before: batch_probe.Seen | None = None
    ) -> batch_probe.Seen:
        """Return what the step makes of this one of the items of `batch`; see
        `batch_probe.observe`.
        """
        with self.in_force(batch) as given:
            return batch_probe.observe(self.model, self.step, given.delivered(seed, item), before)

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
            run = replace(self, args=job, state={"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": stage})
            with replaced((self.model, "vp_stage", stage)):
                seen.append(run.observe(batch, seed, 2 + (stage or 0), before))
        return seen

    def train(self, batch: Batch, seed: int) -> Outcome:
        """Train one step on two microbatches drawn like `batch`: run forward, backward and the
        reduction of gradients, as Megatron's training loop does. Labels that the loss mask hides
        are others than in the reference run.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        seen: list[Tensor] = []
        returned: set[int] = set()

        def observed(iterator: Any, module: Any) -> Any:
            output, loss = self.step(iterator, module)
            seen.append(output.detach().reshape(batch.shape[0], -1).double())

            def counted(losses: Any) -> Any:
                outputs = loss(losses)
                returned.add(len(outputs))
                return outputs

            return output, counted

        model = self.model
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            average_in_collective=getattr(self.args, "ddp_average_in_collective", False),
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        model.model_type = ModelType.encoder_or_decoder
        with self.in_force(batch) as given:
            blind, size = not self.whole, vocabulary_of(model)
            items = [given.trained(seed + i, blind, size) for i in range(MICROBATCHES)]
            wrapped = DistributedDataParallel(model.config, config, model)
            wrapped.zero_grad_buffer()
            reports = forward_backward_no_pipelining(
                forward_step_func=observed,
                data_iterator=iter(items),
                model=[wrapped],
                num_microbatches=len(items),
                seq_length=batch.shape[1],
                micro_batch_size=batch.shape[0],
                forward_only=False,
            )
            wrapped.grad_accs.clear()  # breaks a cycle through autograd, which would keep the model
            report = sum(next(iter(each.values())).double().reshape(-1) for each in reports)
            dist.all_reduce(
                report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
        gradients = {
            name: parameter.main_grad.double() for name, parameter in model.named_parameters()
        }
        loss = float(report[0] / report[-1])
        return Outcome(seen, loss, gradients, len(report) == 2 and returned == {3})


def tiny_runs(
    tiny: argparse.Namespace, config: Any, dtype: torch.dtype, batch: Batch, step: Any, alone: Any
) -> list[TinyRun]:
    """Return the run of a tiny model as the job trains it, and the reference run with the same
    weights. They are built for microbatches like `batch`, and take others too.

    tiny, config: the arguments and the configuration of the tiny model.
    dtype: that of the job's attention.
    step: the forward step; None stands for that of `cp_ring.pretrain_gpt`.
    alone: a process group of this rank only.
    """
    if is_own(step):
        from cp_ring.megatron.gpt import forward_step as step  # imports Megatron
    runs = []
    for whole in (False, True):
        changes = {"context_parallel_size": 1, "recompute_granularity": None} if whole else {}
        run = TinyRun(step, with_changes(tiny, changes), one_stage(alone, whole), whole)
        with run.in_force(batch):
            run.model = build(tiny, with_changes(config, changes), dtype)
        runs.append(run)
    runs[True].model.load_state_dict(runs[False].model.state_dict())
    return runs


@contextmanager
def _whole_rows_in_force(model: Any, batch: Batch) -> Iterator[None]:
    """Put in force what the reference run of `model` does with whole batch rows: cp_ring's settings
    for rows in order, dense masks in place of the ring, recurrent layers document by document, and
    multi-token prediction inside the declared documents.

    Rotary embeddings follow declared positions, and those of documents that a layout balances. The
    kinds of masks stay set if the batch declares masks, which a step reads.
    """
    last = torch.stack([rule.last for rule in batch.rules])
    places = None
    if in_force().by_microbatch:
        ids = torch.stack([rule.positions for rule in batch.rules], 1)
        places = ids, torch.arange(len(ids))[:, None].expand_as(ids)

    def rolled(tensor: Any, fill: bool, *rest: Any, **named: Any) -> Any:
        x = tensor.roll(-1, -1).masked_fill(last.to(tensor.device).view(tensor.shape), fill)
        return x, x.sum()

    def roll(*args: Any, **named: Any) -> Any:
        from cp_ring.megatron.next_tokens import in_megatrons_form  # few jobs predict them

        return in_megatrons_form(rolled)(None, *args, **named)

    modules = loaded_modules("megatron.core")
    rolls = ((each, "roll_tensor", roll) for each in modules if "roll_tensor" in vars(each))
    used = settings.current()
    plain = replace(
        used,
        layout="zigzag",
        document_mask=False,
        mask_kinds=used.mask_kinds if KEY in batch.items[0] else "",
        loss_chunk=0,
    )
    layers = _declared_layers(model, batch) if model else ()
    with replaced(*rolls, *layers), positions_in_force(places), settings.in_force(plain):
        yield


def _declared_layers(model: Any, batch: Batch) -> Iterator[tuple[Any, str, Any]]:
    """Yield what layers of the reference run do with `batch` in place of their `forward`."""
    scale, *_ = declared_scale(model.config)
    for core in core_attentions(model):
        window = declared_window(model.config, core.layer_number)
        declared = batch.rules, window, scale, getattr(core, "softmax_offset", None)
        yield core, "forward", functools.partial(attend_whole_rows, *declared)
    for module in model.modules():
        if hasattr(module, "cp_ring_group") and batch.mask != "causal":
            yield module, "forward", functools.partial(_by_document, module.forward, batch.rules)


def _paths(rule: MaskRule) -> list[Tensor]:
    """Return the tokens that the last token of each document or branch of a batch row sees, and
    those that see nothing.
    """
    every = torch.arange(len(rule.last))
    ends = every[rule.last | (rule.positions.diff(append=every[:1]) != 1)]
    return [~rule.sees(every, every), *(rule.sees(end, every) for end in ends)]


def _by_document(
    forward: Function,
    rules: list[MaskRule],
    hidden: Tensor,
    *args: Any,
    **named: Any,
) -> tuple[Tensor, Any]:
    """Run the layer's `forward` on batch rows [n, b, h], one document or branch at a time behind
    all that comes before it, without the documents that `named` may hold.
    """
    named.pop("packed_seq_params", None)
    out, bias = torch.zeros_like(hidden), None
    for row, rule in enumerate(rules):
        for path in filter(torch.any, _paths(rule)):
            part, bias = forward(hidden[path, row, None], *args, **named)
            out[path, row] = part[:, 0]
    return out, bias
