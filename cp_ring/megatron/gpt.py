"""GPT pretraining on Megatron's training loop: splits microbatches over the context-parallel group,
computes the loss, and makes the data sets.

Shapes: b batch rows of a microbatch, n tokens of a batch row, cp the context-parallel size.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)
from torch.utils._pytree import tree_leaves

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.ahead import share
from cp_ring.megatron.adapter.compat import known_arguments
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import Documents, boundaries
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.data.rows import check_rows, declare, on_this_cp_rank
from cp_ring.megatron.settings import current

Microbatch = dict[str, Any]
"""Tensors of a microbatch by name, and `packed_seq_params`."""

_TENSORS = dict.fromkeys(("tokens", "labels", "position_ids"), torch.int64)
_TENSORS |= {"loss_mask": torch.float32}
_WEIGHT = "weight"


def _next_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None) -> Microbatch:
    """Return the next microbatch: tensors [b, n] on this rank's device. Tensor-parallel rank 0
    reads it and sends it to the others.

    With --cp-ring-document-mask it also holds `cu_seqlens`, int64 [documents + 1] on the CPU: the
    offsets of the documents in the stream of all its batch rows. With --cp-ring-mask-kinds it holds
    `cp_ring_mask`, the `Mask` of each batch row.
    """
    return _read_and_broadcast(data_iterator, _TENSORS)


def _read_and_broadcast(data_iterator: Any, types: Mapping[str, torch.dtype]) -> Microbatch:
    extra = _needed_by_every_stage()
    group = parallel_state.get_tensor_model_parallel_group()
    if data_iterator is None and (extra or types) and group.rank() == 0:
        raise ConfigError(
            f"{in_force().expected or '--position-embedding-type mrope'}: this pipeline stage has "
            "no data set, from which documents, masks and positions come"
        )
    data: dict[str, torch.Tensor] = {}
    carried: Microbatch = {}
    if data_iterator is not None:
        sample = next(data_iterator)
        data = {name: sample[name].to(dtype) for name, dtype in types.items()}
        carried = _carried_by(sample, extra)
        if data:
            data["position_ids"] = _positions(data)
    if group.size() == 1:
        return {name: x.cuda(non_blocking=True) for name, x in data.items()} | carried
    moved: Microbatch = {}
    for dtype in dict.fromkeys(types.values()):
        names = [name for name in types if types[name] == dtype]
        moved |= tensor_parallel.broadcast_data(names, data, dtype)
    if extra:
        held = [carried]
        torch.distributed.broadcast_object_list(held, group=group, group_src=0)
        carried = held[0]
        share(group)
    return moved | carried


def _carried_by(sample: Any, extra: str) -> Microbatch:
    """Return the entries of a data set sample that every pipeline stage needs, on the CPU."""
    if extra == "cu_seqlens":
        return {extra: torch.from_numpy(boundaries(_positions(sample)))}
    batch, n = sample["tokens"].shape
    if extra:
        from cp_ring.megatron.data.masks import read  # few jobs declare masks

        return {extra: read(sample.get(KEY), batch, n, current().kinds)}
    if KEY in sample:
        declare(sample[KEY], batch, n, 1)  # its error says what is missing
    return {}


def _needed_by_every_stage() -> str:
    """Return the name of the entry that every pipeline stage needs of a microbatch: `cu_seqlens`,
    `cp_ring_mask`, or "".
    """
    return "cu_seqlens" if current().document_mask else KEY if current().kinds else ""


def _tensors_of_stage(vp_stage: int | None) -> dict[str, torch.dtype]:
    """Return the tensors of a microbatch that a pipeline stage needs, and their types. Each stage
    makes the rotary embeddings of positions with sections (mrope) itself.
    """
    args = get_args()
    if is_first_or_last_pipeline_stage(vp_stage) or _predicts_further(args, vp_stage):
        return _TENSORS
    mrope = args.position_embedding_type == "mrope"
    return {"position_ids": torch.int64} if mrope else {}


def _predicts_further(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Return True for a stage with layers of multi-token prediction, which the last one need not be
    (--pipeline-model-parallel-layout).
    """
    if not (args.mtp_num_layers and args.pipeline_model_parallel_layout):
        return False
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Any, vp_stage: int | None) -> Microbatch:
    """Return this rank's microbatch: tokens, labels, position_ids int64 and loss_mask float32, each
    [b, n / cp].

    `weight`, float64 [], is the sum of the loss mask of the whole microbatch.

    A middle pipeline stage gets None for each of these tensors, but for the position ids of mrope.
    No attention mask is ever built. With --cp-ring-document-mask and --cp-ring-mask-kinds every
    stage reads the microbatch itself, and gets its documents, or the mask that it carries as
    `cp_ring_mask`, as `packed_seq_params`.
    """
    group = parallel_state.get_context_parallel_group()
    cp = group.size()
    nothing = dict.fromkeys((*_TENSORS, _WEIGHT, "packed_seq_params"))
    types = _tensors_of_stage(vp_stage)
    extra = _needed_by_every_stage()
    if not extra and not types:
        return nothing
    ends = types is _TENSORS
    batch = _next_batch(data_iterator) if ends else _read_and_broadcast(data_iterator, types)
    # of the whole microbatch
    counts = {_WEIGHT: batch["loss_mask"].sum(dtype=torch.float64)} if "loss_mask" in batch else {}
    check_rows(batch, group)
    entry = batch.pop(extra, None)
    carried: MicrobatchMask | None = None
    if extra == "cu_seqlens":
        rows = int(entry[-1]) // get_args().seq_length
        carried = Documents.in_rows(entry.numpy(), rows, cp, in_force().split)
    elif extra:
        carried = declared = declare(entry, len(entry), entry[0].n, cp)
        batch = declared.with_positions(batch)
    whole = _mrope_positions(batch) | counts
    return nothing | on_this_cp_rank(batch, group.rank(), cp, carried) | whole


def _positions(batch: Microbatch) -> torch.Tensor:
    """Return the position ids of a data set's microbatch, [b, n], or [3, b, n] with sections."""
    ids: torch.Tensor = batch["position_ids"]
    return ids.transpose(0, 1) if ids.dim() == 3 else ids


def _mrope_positions(batch: Microbatch) -> Microbatch:
    """Remove the position ids for `--position-embedding-type mrope` from `batch` and return them:
    int64 [3, b, n] of whole batch rows.

    The model splits them by itself. Samples of a data set may have them as [3, n]: in time, height
    and width. Those of text are the same in all three.
    """
    if "position_ids" in batch and get_args().position_embedding_type == "mrope":
        return {"position_ids": batch.pop("position_ids").expand(3, -1, -1)}
    if "position_ids" in batch and batch["position_ids"].dim() == 3:
        raise ConfigError("position_ids have three sections: give --position-embedding-type mrope")
    return {}


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of this rank's losses of tokens that count, the number of these tokens, and a
    report of both for the log.

    Megatron divides by the number of tokens of all ranks (--calculate-per-token-loss). This is
    exact with context parallelism. It wants whole numbers, see `_count`; the report has the exact
    sum of the loss mask.

    Args:
        loss_mask: how much each token counts, [b, n / cp].
        losses: the loss of each token, [b, n / cp].
        weight: the sum of the loss mask on all context-parallel ranks, float64 []; by default that
        of this rank alone.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    counted = mask.sum().detach()
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: not torch.isfinite(value).all(),
            message="the loss is not finite",
            tolerance=0.0,
            fatal=True,
        )
    report = {"lm loss": torch.stack([loss.detach(), counted.to(loss.dtype)])}
    if get_args().calculate_per_token_loss and weight is not None:
        return loss, _count(weight), report
    number = counted.ceil()  # Megatron divides the loss of this rank by it
    return loss * torch.where(counted > 0, number / counted, 1.0), number.to(torch.int), report


def _count(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the tokens that count in a microbatch, int32 []. The shares of
    all ranks add up to the microbatch's weight, rounded.

    Loss masks may hold fractions, but Megatron adds up whole numbers. If each rank rounded its own
    sum, the total would depend on the context-parallel size.
    """
    group = parallel_state.get_context_parallel_group()
    rank = group.rank()
    cp = group.size()
    total = weight.round().to(torch.int64)
    return (total * (rank + 1) // cp - total * rank // cp).to(torch.int)


def forward_step(
    data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one microbatch through the model. Returns the output and its loss function, as Megatron's
    schedules expect.

    With `return_schedule_plan`, the schedule runs the layers itself
    (--overlap-moe-expert-parallel-comm), and this function returns a plan in place of the output.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    named = {name: batch[name] for name in ("labels", "loss_mask", "packed_seq_params")}
    output = run(batch["tokens"], batch["position_ids"], None, **named)
    return output, functools.partial(loss_function, batch["loss_mask"], weight=batch.get(_WEIGHT))


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return Megatron's settings of the data sets from its flags, most of which have their names,
    without attention masks.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    wanted = vars(args) | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": False,
        "inter_document_masking": getattr(args, "dataloader_inter_document_masking", False),
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    return GPTDatasetConfig(**known_arguments(GPTDatasetConfig, wanted))


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return which ranks of a pipeline hold the word embedding: also those that predict further
    tokens.
    """
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


def datasets_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Return the training, validation and test data sets from --data-path (or similar flags) or
    --mock-data; with --sft they hold conversations.
    """
    args = get_args()
    if args.dataloader_type == "external":
        raise ConfigError(
            "--dataloader-type external needs the loaders of a script of your own: give single or "
            "cyclic"
        )
    kind: type = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        from cp_ring.megatron.data.sft import PackedConversations

        kind = PackedConversations

    def built_here() -> bool:
        wanted = _needed_by_every_stage() or _tensors_of_stage(vp_stage)
        return parallel_state.get_tensor_model_parallel_rank() == 0 and bool(wanted)

    print_rank_0("> building the data sets")
    made = BlendedMegatronDatasetBuilder(
        kind, num_samples, built_here, dataset_config(args)
    ).build()
    if built_here() and made[1] is None and (args.eval_iters or args.full_validation):
        what = f"--split {args.split} leaves" if args.split else "--train-data-path alone gives"
        advice = "leave out --full-validation" if args.full_validation else "give --eval-iters 0"
        raise ConfigError(f"{what} no validation data: {advice}")
    if kind is GPTDataset and args.cp_ring_document_mask and args.reset_attention_mask:
        _check_ends(made)
    return made


def _check_ends(made: Any) -> None:
    """Raise `ConfigError` if the first 100 documents of no data set hold the end-of-document token,
    so that nothing would be masked; where some do, print which do not.

    A blend has several data sets, and there may be several of validation; the splits of a path read
    the same documents.
    """
    ends = {}
    for each in tree_leaves(made):
        for one in getattr(each, "datasets", [each]):
            if documents := getattr(one, "dataset", None):
                eod = one.config.tokenizer.eod
                first = range(documents.document_indices[:101][-1])
                ends[one.dataset_path] = any(eod in documents[place] for place in first)
    if lacking := [path for path in ends if not ends[path]]:
        text = (
            "--cp-ring-document-mask: no end-of-document token "
            f"({eod}) ends the documents of {', '.join(lacking)}: make the data with --append-eod "
            "of preprocess_data.py, or give --dataloader-inter-document-masking (Megatron 0.19 and "
            "later)"
        )
        if lacking == [*ends]:
            raise ConfigError(text)
        note(text)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]
