"""Rejects flags of jobs on Megatron's training loop: sizes, data, layer specifications."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile

from cp_ring.errors import one_line
from cp_ring.megatron import compat
from cp_ring.megatron.adapter.asked import Asked, Check
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.flags.checks_documents import documents_flag, splits_packed
from cp_ring.megatron.options import Options


def ring(args: Asked, options: Options) -> str | None:
    """Reject settings that need ring attention if the job does not use it, and both ways to it."""
    if options.enabled and options.beneath:
        return (
            f"--cp-ring-beneath {options.beneath} keeps the attention classes that --cp-ring "
            "replaces: leave out one of the two"
        )
    if options.beneath and args.cp > 1 and args.dataloader_inter_document_masking:
        return (
            f"--cp-ring-beneath {options.beneath} does not support "
            "--dataloader-inter-document-masking: Megatron splits its batch rows as a whole, and "
            "TransformerEngine expects each document to be split: give --cp-ring instead"
        )
    needing = "document_mask", "mask_kinds", "loss_chunk", "balance_microbatches"
    found = next((options.flag(name) for name in needing if getattr(options, name)), "")
    return (
        f"{found} needs ring attention: give --cp-ring" if found and not options.enabled else None
    )


def ranks(args: Asked, options: Options) -> str | None:
    """Reject a context parallel size below 1, which Megatron does not check."""
    if (size := args.context_parallel_size) is not None and size < 1:
        return f"--context-parallel-size {size} is no number of ranks: give 1 or more"
    return None


def loss_in_parts(args: Asked, options: Options) -> str | None:
    """Reject features that need all logits at once, because the loss in chunks never has them."""
    if options.loss_chunk and args.defer_embedding_wgrad_compute:
        return (
            "--cp-ring-loss-chunk does not support --defer-embedding-wgrad-compute, which needs "
            "all logits at once: leave out one of the two"
        )
    return None


def balance(args: Asked, options: Options) -> str | None:
    """Reject jobs whose batch rows cannot be reordered among the microbatches of a step."""
    flag = "--cp-ring-balance-microbatches"
    if not options.balance_microbatches:
        return None
    if not documents_flag(args, options):
        return (
            f"{flag} needs batch rows of unequal work: give --sft, "
            "--dataloader-inter-document-masking, --cp-ring-document-mask or --cp-ring-mask-kinds"
        )
    if not args.calculate_per_token_loss:
        return (
            f"{flag} changes which batch rows share a microbatch, and so Megatron's mean loss: "
            "give --calculate-per-token-loss"
        )
    if args.dataloader_type not in (None, "single", "cyclic"):
        return f"{flag} does not support {args.shown('dataloader_type')}: give single or cyclic"
    other = args.first(
        "rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"
    )
    return f"{flag} needs steps of equal size: leave out {other}" if other else None


def layers(args: Asked, options: Options) -> str | None:
    """Reject a layer specification that cannot be imported: Megatron up to 0.19 would train its
    default layers.
    """
    try:
        if args.spec:
            module, name = args.spec
            getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return (
            f"{args.shown('spec')} cannot be imported ({one_line(error)}): give a module and the "
            "name of its layer specification"
        )
    local = args.spec or args.transformer_impl != "transformer_engine"
    if not local and not compat.has_transformer_engine():
        return (
            "transformer_impl: transformer_engine (--transformer-impl; Megatron's default) needs "
            'TransformerEngine, which is not installed here: pip install -e ".[te]", or give '
            "transformer_impl: local (--transformer-impl local)"
        )
    return None


def data_files(args: Asked, options: Options) -> str | None:
    """Reject missing data files early: Megatron finds them on one rank, late."""
    if args.sft and args.mock_data and options.document_mask:
        return "--sft needs conversations: give --data-path FILE.jsonl instead of --mock-data"
    suffixes = ("",) if args.sft else (".idx", ".bin")
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _files(getattr(args, name), args):
            for path in (Path(prefix + suffix) for suffix in suffixes):
                if not path.is_file() or not path.stat().st_size:
                    file = "" if args.sft else f"{path} "
                    what = "is empty" if path.is_file() else "does not exist"
                    return f"--{name.replace('_', '-')} {prefix}: {file}{what}"
    return None


def _files(words: Sequence[str] | None, args: Asked) -> Iterator[str]:
    """Yield the paths of data sets, which may stand with weights, without object stores and folders
    that Megatron's own data set may read.
    """
    words = words or []
    weighted = len(words) % 2 == 0 and all(map(_is_number, words[::2]))
    for prefix in words[1::2] if weighted else words:
        if not ("://" in prefix or (args.sft and Path(prefix).is_dir())):
            yield prefix


def splits(args: Asked, options: Options) -> str | None:
    """Reject a --split that leaves validation or test nothing of the data: Megatron waits for ever,
    or with --sft divides by zero after training. Rows that cp_ring packs may be without.
    """
    paths = [*_files(args.data_path, args)]
    # each part of a blend needs some
    packs = len(paths) == 1 and args.sft and (options.document_mask or splits_packed(args, options))
    split = args.split or "969, 30, 1"
    for path in () if packs or data_files(args, options) else paths:
        from megatron.core.datasets import blended_megatron_dataset_config as megatrons

        with open(path if args.sft else f"{path}.idx", "rb") as file:
            # the header of an index: a magic word of 9 bytes, version, dtype, number of documents
            count = (
                sum(1 for _ in file) if args.sft else int.from_bytes(file.read(26)[18:], "little")
            )
        shares = megatrons.parse_and_normalize_split(split)
        edges = [round(sum(shares[:end]) * count) for end in range(4)]
        parts = zip(("train", "validation", "test"), shares, pairwise(edges), strict=True)
        for name, share, (begin, end) in parts:
            if share and begin == end:
                return (
                    f"--split {split} leaves {name} none of the {count} documents of --data-path "
                    f"{path}: give --split 100,0,0 and --eval-iters 0, or more documents"
                )
    return None


def checkpoints(args: Asked, options: Options) -> str | None:
    """Reject a folder that cannot be written, which Megatron finds at the first save, and say where
    there is no checkpoint to load, which it hides among warnings.
    """
    load = args.load or ""
    save = args.save or ""
    if load and "://" not in load:
        folder = Path(load)
        if not any([*folder.glob("iter_*"), *folder.glob("latest_*")]):
            note(f"--load {load} has no checkpoint: training begins at the first step")
    try:
        if save and "://" not in save:
            path = Path(save).absolute()
            TemporaryFile(dir=next(filter(Path.exists, (path, *path.parents)))).close()
    except OSError as error:
        return f"--save {save} cannot be written ({error.strerror}): give another folder"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


JOB: tuple[Check, ...] = (ring, ranks, loss_in_parts, balance)
HERE: tuple[Check, ...] = (layers, data_files, splits, checkpoints)
"""Checks that look at files and packages of this machine."""
