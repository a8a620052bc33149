"""Probe of a tiny model made from the job's flags: losses and gradients of one microbatch, against context parallel size 1.

The model takes one training step's forward and backward as the job does: the job's split of the batch, its forward step and loss,
Megatron's schedule, DistributedDataParallel and reduction of gradients. Its twin, with the same weights, sees the whole rows, and
attends by a dense mask in float64. All in float32, so that nothing but context parallelism tells them apart.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate import microbatch
from cp_ring.megatron.certificate.layer_kinds import Kind, declared_scale, declared_window
from cp_ring.megatron.certificate.oracle import DenseAttention, Spans
from cp_ring.megatron.certificate.report import Probe

# Norms of errors over norms; on CUDA matrix products may round to TF32.
BOUND = {"cpu": 1e-4, "cuda": 1e-2}
VOCABULARY = 128
HIDDEN = 64

Step = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]


@dataclass(frozen=True)
class Microbatch:
    """Whole rows [b, n] as a data set gives them, and the documents of each."""

    data: dict[str, Tensor]
    spans: list[Spans]

    @classmethod
    def draw(cls, n: int, documents: bool, uneven: bool, seed: int) -> Microbatch:
        """Random tokens; with `documents` two rows of some; with `uneven` a loss mask that differs between ranks."""
        random = torch.Generator().manual_seed(seed)
        cuts = [microbatch.cut(n, 3, row) for row in (1, 2)] if documents else [microbatch.cut(n, 0, 1)]
        spans = [microbatch.spans_of(edges) for edges in cuts]
        tokens = torch.randint(VOCABULARY, (len(spans), n + 1), generator=random)
        share = torch.linspace(0.4, 1.0, n) if uneven else torch.ones(n)
        mask = (torch.rand(len(spans), n, generator=random) < share).float()
        positions = torch.empty(len(spans), n, dtype=torch.int64)
        for row, of_row in enumerate(spans):
            for start, end in of_row:
                positions[row, start:end] = torch.arange(end - start)
                mask[row, end - 1] *= not documents
        data = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "position_ids": positions}
        return cls(data | {"loss_mask": mask}, spans)


@dataclass(frozen=True)
class Outcome:
    """What a step left: the loss of each of this rank's tokens [b, s], the loss of the log, gradients by parameter."""

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]


def tiny_args(args: argparse.Namespace, kinds: list[Kind], rows: int) -> argparse.Namespace:
    """The job's arguments with one small dense layer of each kind, in float32, without pipeline stages."""
    tp = args.tensor_model_parallel_size
    sharing = args.num_attention_heads // (args.num_query_groups or args.num_attention_heads) if args.group_query_attention else 1
    groups = min(args.num_attention_heads // sharing, 2 * tp)
    changes: dict[str, Any] = {
        "num_layers": len(kinds), "hidden_size": HIDDEN * tp, "ffn_hidden_size": 2 * HIDDEN * tp,
        "num_attention_heads": groups * sharing,
        "num_query_groups": groups if args.group_query_attention else args.num_query_groups,
        "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY * tp, "seq_length": kinds[0].tokens, "micro_batch_size": rows,
        "max_position_embeddings": kinds[0].tokens, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
        "init_method_std": HIDDEN**-0.5, "params_dtype": torch.float32, "hidden_dropout": 0.0,
        "moe_layer_freq": 1, "num_moe_experts": None, "pipeline_dtype": None,
    }  # fmt: skip
    nothing = (
        "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_virtual_stages_per_pipeline_rank",
        "num_experts", "fp8", "fp4", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "embedding_init_method_std", "expert_tensor_parallel_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    )  # fmt: skip
    off = (
        "bf16", "fp16", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp",
        "use_torch_fsdp2", "check_for_nan_in_loss_and_grad", "gradient_accumulation_fusion", "tp_comm_overlap",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "cpu_offloading",
        "fine_grained_activation_offloading", "init_model_with_meta_device", "moe_shared_expert_overlap", "fp8_param_gather",
        "overlap_moe_expert_parallel_comm", "sft",
        "dataloader_inter_document_masking", "moe_grouped_gemm", "log_num_zeros_in_grad",
    )  # fmt: skip
    changes |= dict.fromkeys(nothing) | dict.fromkeys(off, False)
    if args.window_size is not None:
        window = max(kinds, key=lambda kind: kind.probed[0]).probed
        changes |= {"window_size": window, "window_attn_skip_freq": [int(kind.window[0] >= 0) for kind in kinds]}
    kept = {name: value for name, value in changes.items() if hasattr(args, name)}
    return argparse.Namespace(**(vars(args) | kept))


def uncovered(args: argparse.Namespace) -> str:
    """Why no tiny model can be made from these flags, or ""."""
    if getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None):
        return "hybrid models"
    if getattr(args, "heterogeneous_layers_config_path", None):
        return "heterogeneous layers"
    return "models from a YAML file" if getattr(args, "yaml_cfg", None) else ""


def is_own(step: Step | None) -> bool:
    """Whether `step` is the forward step of `cp_ring.pretrain_gpt`, also for None, and not a script's own."""
    from cp_ring.megatron import gpt

    return step is None or getattr(step, "__module__", "") == gpt.__name__


def probe(args: argparse.Namespace, kinds: list[Kind], alone: Any, step: Step | None, seed: int) -> list[Probe]:
    """Losses, loss and gradients of the tiny model of `args`, whose layers are `kinds`; every rank of the job calls it.

    `alone` is a process group of this rank only, `step` the job's forward step: that of `cp_ring.pretrain_gpt`, also for None,
    or a script's own, which then runs at context parallel size 1 too, because it may have a loss of its own.
    """
    from cp_ring.megatron.gpt import forward_step

    own = is_own(step)
    step = forward_step if own or step is None else step
    documents = kinds[0].mask == "documents"
    batch = Microbatch.draw(kinds[0].tokens, documents, args.calculate_per_token_loss, seed)
    tiny = tiny_args(args, kinds, len(batch.spans))
    with ExitStack() as stack:
        stack.enter_context(_in_force(tiny, _one_stage(alone)))
        model = _build(tiny)
        ours = _train(model, batch, step)
        where = _positions(batch, kinds[0])
    state = model.state_dict()
    with _in_force(argparse.Namespace(**(vars(tiny) | {"context_parallel_size": 1})), _one_rank(alone)), _plain_settings(batch):
        twin = _build(_args())
        twin.load_state_dict(state)
        _attend_densely(twin, batch.spans)
        wanted = _train(twin, batch, _whole_rows if own else step)
    return _compare(ours, wanted, where, kinds)


def _compare(ours: Outcome, wanted: Outcome, where: Tensor, kinds: list[Kind]) -> list[Probe]:
    bound, mask = BOUND["cuda" if ours.losses.is_cuda else "cpu"], kinds[0].mask
    layer, rank = f"tiny model of {len(kinds)} layer{'s' * (len(kinds) > 1)}", f"rank {dist.get_rank()}"
    truth = torch.stack([losses.index_select(0, where[row]) for row, losses in enumerate(wanted.losses)])
    difference = ours.losses - truth
    row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), truth.shape[1])
    place = f"{rank}: worst at query {int(where[row, token])} of row {row}"
    total = torch.stack([gradient.norm() for gradient in wanted.gradients.values()]).norm()
    errors = {
        name: float((ours.gradients[name] - gradient).norm() / gradient.norm().clamp(min=float(total) * 1e-2))
        for name, gradient in wanted.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    ratio = torch.stack([gradient.norm() for gradient in ours.gradients.values()]).norm() / total
    return [
        Probe("loss of each token", layer, mask, float(difference.norm() / truth.norm()), bound, place),
        Probe(
            "loss", layer, mask, abs(ours.loss / wanted.loss - 1), bound, f"{rank}: {ours.loss:.6g}, at cp 1 {wanted.loss:.6g}"
        ),
        Probe("gradient norm", layer, mask, abs(float(ratio) - 1), bound, f"{rank}: {float(ratio):.6g} of that at cp 1"),
        Probe("gradients", layer, mask, errors[worst], 10 * bound, f"{rank}: worst in {worst}"),
    ]


def _positions(batch: Microbatch, kind: Kind) -> Tensor:
    """Positions [b, s] of this rank's tokens in their rows, as the job's own split gives them."""
    from megatron.core import parallel_state

    from cp_ring.megatron.gpt import on_this_cp_rank

    rank, cp = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    tokens = batch.data["tokens"]
    if kind.mask == "documents":
        stream = _stream(batch)
        made = microbatch.documents_in_rows(stream, len(batch.spans), cp)
        return made.shard(torch.arange(tokens.shape[1]).expand(tokens.shape), rank).to(own_device())
    whole = torch.arange(tokens.shape[1])[None]
    return on_this_cp_rank({"tokens": whole}, rank, cp)["tokens"].to(own_device())


def _stream(batch: Microbatch) -> Any:
    import numpy as np

    n = batch.data["tokens"].shape[1]
    ends = [end + row * n for row, spans in enumerate(batch.spans) for _, end in spans]
    return np.array([0, *ends], dtype=np.int64)


def own_device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _args() -> argparse.Namespace:
    from megatron.training import get_args

    args: argparse.Namespace = get_args()
    return args


def _build(args: argparse.Namespace) -> Any:
    """The whole model of `args`, on this rank's device."""
    from megatron.core import tensor_parallel

    try:
        from megatron.training.argument_utils import gpt_config_from_args
    except ImportError:
        from cp_ring.megatron.gpt_model import build

        model = build()
    else:
        from megatron.core.process_groups_config import ProcessGroupCollection

        config = gpt_config_from_args(args)
        builder = config.get_builder_cls()(config)
        model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.to(own_device())


def _train(model: Any, batch: Microbatch, step: Step) -> Outcome:
    """Forward, backward and reduction of gradients of one microbatch, as Megatron's training loop runs them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    args, seen = _args(), []
    known = {"grad_reduce_in_fp32": True, "average_in_collective": getattr(args, "ddp_average_in_collective", False)}
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(**compat.known_fields(DistributedDataParallelConfig, known)), model
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.model_type = ModelType.encoder_or_decoder
    wrapped.zero_grad_buffer()

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().clone())
        return output, loss

    reports = forward_backward_no_pipelining(
        forward_step_func=observed, data_iterator=iter([batch.data]), model=[wrapped], num_microbatches=1,
        seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, forward_only=False,
    )  # fmt: skip
    report = next(iter(reports[0].values())).detach().clone().double().reshape(-1)
    report = report if report.numel() == 2 else torch.stack([report[0], torch.ones_like(report[0])])
    dist.all_reduce(report, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    gradients = {name: parameter.main_grad.detach().double() for name, parameter in model.named_parameters()}
    return Outcome(seen[0].reshape(len(batch.spans), -1).double(), float(report[0] / report[1]), gradients)


def _whole_rows(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """The forward step of the twin: whole rows, no packing, the sum of the losses that count and their number."""
    batch = {name: tensor.to(own_device()) for name, tensor in next(iterator).items()}
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (losses.reshape(-1).float() * mask.reshape(-1)).sum(), mask.sum()
        return total, count.detach().to(torch.int), {"lm loss": torch.stack([total.detach(), count])}

    return output, loss


def _attend_densely(model: Any, spans: list[Spans]) -> None:
    """Replaces ring attention in every layer of the twin by what the flags declare."""
    from cp_ring.megatron.core_attention import RingDotProductAttention

    scale = declared_scale(model.config)[0]
    for module in model.modules():
        ring = getattr(module, "core_attention", None)
        if isinstance(ring, RingDotProductAttention):
            module.core_attention = DenseAttention(ring, declared_window(model.config, ring.layer_number), scale, spans)


@contextmanager
def _plain_settings(batch: Microbatch) -> Iterator[None]:
    """cp_ring's settings of the twin, whole rows in order; and multi-token prediction within the declared documents alone."""
    n = batch.data["tokens"].shape[1]
    last = torch.zeros(len(batch.spans), n, dtype=torch.bool)
    for row, spans in enumerate(batch.spans):
        for _, end in spans:
            last[row, end - 1] = True

    def roll(tensor: Tensor | None, shifts: int = -1, dims: int = -1, *rest: Any, **named: Any) -> Any:
        if tensor is None:
            return None, None
        rolled = torch.roll(tensor, -1, -1).masked_fill(last.to(tensor.device).view(tensor.shape), 0)
        return rolled, rolled.sum()

    before = settings.current()
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core") and module]
    with ExitStack() as stack:
        for module in loaded:
            if "roll_tensor" in vars(module):
                stack.enter_context(patch.object(module, "roll_tensor", roll))
        settings.configure(before.model_copy(update={"layout": "zigzag", "document_mask": False}))
        stack.callback(functools.partial(settings.configure, before))
        yield


@contextmanager
def _in_force(args: argparse.Namespace, groups: dict[str, Any]) -> Iterator[None]:
    """Megatron's global arguments, timers and groups replaced, and afterwards as they were."""
    from megatron.core import Timers, parallel_state
    from megatron.training import global_vars

    with ExitStack() as stack:
        stack.enter_context(patch.object(global_vars, "_GLOBAL_ARGS", args))
        stack.enter_context(patch.object(global_vars, "_GLOBAL_TIMERS", Timers(0, "minmax")))
        for name, value in groups.items():
            if hasattr(parallel_state, name):
                stack.enter_context(patch.object(parallel_state, name, value))
        yield


def _one_stage(alone: Any) -> dict[str, Any]:
    """The parallel state of a rank that holds every stage of its model."""
    here = [dist.get_rank()]
    groups = ("_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GROUP")
    ranks = ("_PIPELINE_GLOBAL_RANKS", "_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS")
    none = ("_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
    virtual = ("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
    return dict.fromkeys(groups, alone) | dict.fromkeys(ranks, here) | dict.fromkeys((*none, *virtual))


def _one_rank(alone: Any) -> dict[str, Any]:
    """As `_one_stage`, and whole rows and batches too: context and data parallel size 1."""
    from megatron.core import parallel_state

    here = [dist.get_rank()]
    data = [name for name in vars(parallel_state) if "DATA_PARALLEL_GROUP" in name and "EXPERT" not in name]
    data = [name for name in data if "GLOO" not in name and not name.startswith("_TENSOR")]
    groups = dict.fromkeys(data, alone) | {"_CONTEXT_PARALLEL_GROUP": alone, "_CONTEXT_PARALLEL_GLOBAL_RANKS": here}
    tensor = parallel_state.get_tensor_model_parallel_group()
    both = ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
    return _one_stage(alone) | groups | dict.fromkeys(both, tensor)
