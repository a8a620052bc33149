"""Rejects features that do not work with documents, declared masks or recurrent layers."""

from __future__ import annotations

from cp_ring.megatron.adapter.asked import Asked, Check
from cp_ring.megatron.flags.layer_pattern import letters_of
from cp_ring.megatron.options import Options


def documents_flag(args: Asked, options: Options, in_rows: bool = False) -> str:
    """Return the first flag that asks for documents or masks, or "". With `in_rows`, --sft does not
    count, because it splits each document separately.
    """
    flags = {
        "--sft": args.sft and not in_rows,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--cp-ring-document-mask": options.document_mask,
        "--cp-ring-mask-kinds": options.mask_kinds,
    }
    return next((flag for flag, given in flags.items() if given), "")


def splits_packed(args: Asked, options: Options) -> bool:
    """Return True if the balanced layout splits the packed batches of a script."""
    packed = args.sft or args.dataloader_inter_document_masking
    return bool(packed and options.named_layout.weighs and not options.document_mask)


def masks_documents(args: Asked, options: Options) -> bool:
    """Return True if Megatron's data set finds the documents of each batch row by their
    end-of-document tokens.
    """
    return options.document_mask and not (args.dataloader_inter_document_masking or args.sft)


def one_mask(args: Asked, options: Options) -> str | None:
    """Reject flags that define the mask of a batch row twice."""
    if options.mask_kinds and options.document_mask:
        return (
            "--cp-ring-mask-kinds and --cp-ring-document-mask both define the mask: give "
            "--cp-ring-mask-kinds alone, and a mask made by Mask.documents in each batch"
        )
    if options.mask_kinds and args.dataloader_inter_document_masking:
        return (
            "--cp-ring-mask-kinds and --dataloader-inter-document-masking both define the mask: "
            "leave out one of the two"
        )
    if args.sft and args.dataloader_inter_document_masking:
        return (
            "--sft and --dataloader-inter-document-masking name different data sets: leave out one "
            "of the two"
        )
    if args.reset_attention_mask and not masks_documents(args, options):
        return (
            "--reset-attention-mask makes masks of s x s tokens: give --cp-ring-document-mask "
            "instead"
        )
    return None


def two_microbatches(args: Asked, options: Options) -> str | None:
    """Reject documents with the schedule of two overlapping microbatches, which does not pass them
    on.
    """
    found = documents_flag(args, options)
    if found and args.overlap_moe_expert_parallel_comm:
        return (
            f"--overlap-moe-expert-parallel-comm does not support {found}, because its schedule "
            "does not pass documents to the layers: leave out one of the two"
        )
    return None


def skipped_steps(args: Asked, options: Options) -> str | None:
    """Reject packed batches of steps that Megatron skips: it splits each of their documents."""
    skips = args.iterations_to_skip and args.dataloader_inter_document_masking and args.cp > 1
    if skips and not options.named_layout.weighs:
        return (
            "--iterations-to-skip with --dataloader-inter-document-masking: Megatron would cut "
            "each document of a skipped step into 2 * cp equal parts: give --cp-ring-layout "
            "balanced"
        )
    return None


def rows_of_experts(args: Asked, options: Options) -> str | None:
    """Reject several batch rows with experts: a rank holds parts of all rows, and Megatron treats
    them as whole rows.
    """
    masked = args.dataloader_inter_document_masking and not options.document_mask
    rows = args.micro_batch_size or 1
    flag = "--dataloader-inter-document-masking"
    if not masked or args.cp == 1:
        return None
    if rows > 1 and "seq_aux_loss" in str(args.moe_router_load_balancing_type):
        return (
            f"{flag} --moe-router-load-balancing-type seq_aux_loss: Megatron treats a rank's "
            "tokens as whole batch rows: give --micro-batch-size 1, or aux_loss"
        )
    parts = args.cp * (args.tp if args.sequence_parallel else 1)
    if args.num_experts and rows // parts > 1 and rows % parts:
        return (
            f"{flag} with --num-experts and --context-parallel-size {args.cp}: Megatron's expert "
            "layers treat a rank's tokens as whole batch rows: give --micro-batch-size 1"
        )
    return None


def recurrent_layers(args: Asked, options: Options) -> str | None:
    """Reject what recurrent layers do not support."""
    if not letters_of(args):
        return None
    from cp_ring.megatron.flags.recurrent_choice import rejection  # few jobs have such layers

    return rejection(args, options)


DOCUMENTS: tuple[Check, ...] = (
    one_mask, two_microbatches, skipped_steps, rows_of_experts, recurrent_layers,
)  # fmt: skip
