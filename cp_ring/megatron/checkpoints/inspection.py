"""What can be said of a saved checkpoint before any process group exists: whether it is whole, and which model it holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import folders, manifest, unpickle
from cp_ring.megatron.rejection import note

# Attribute of Megatron's arguments, and the flag that sets it.
_SHAPE = (
    ("num_layers", "--num-layers"),
    ("hidden_size", "--hidden-size"),
    ("ffn_hidden_size", "--ffn-hidden-size"),
    ("num_attention_heads", "--num-attention-heads"),
    ("group_query_attention", "--group-query-attention"),
    ("num_query_groups", "--num-query-groups"),
    ("kv_channels", "--kv-channels"),
    ("num_experts", "--num-experts"),
    ("vocab_size", "--vocab-size"),
    ("position_embedding_type", "--position-embedding-type"),
    ("normalization", "--normalization"),
    ("swiglu", "--swiglu"),
    ("add_bias_linear", "--disable-bias-linear"),
    ("add_qkv_bias", "--add-qkv-bias"),
    ("qk_layernorm", "--qk-layernorm"),
    ("multi_latent_attention", "--multi-latent-attention"),
    ("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
)


def tracked_iteration(load: Path) -> int | None:
    """The iteration that Megatron would load from the folder `load`, or None if there is none (or only a release)."""
    return folders.tracked(load)


def defect(folder: Path) -> str:
    """Why the checkpoint `folder` (iter_N) is not whole, or "", without computing checksums."""
    return manifest.defect(folder, checksums=False) or structure_defect(folder)


def structure_defect(folder: Path) -> str:
    """As `defect`, by the checkpoint's own index alone. Only Megatron's torch_dist format is looked into.

    Raises `ConfigError` if the index is a pickle that could run code.
    """
    if not folder.is_dir():
        return f"{folder} does not exist"
    about = folder / "metadata.json"
    if not about.is_file():
        legacy = any(folder.glob("mp_rank_*"))
        return "" if legacy else f"{about} is missing"
    try:
        backend = json.loads(about.read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return f"{about} is not readable"
    return _torch_dist_defect(folder) if backend == "torch_dist" else ""


def _torch_dist_defect(folder: Path) -> str:
    index = folder / ".metadata"
    if not index.is_file():
        return f"{index} is missing"
    try:
        with index.open("rb") as file:
            stored = unpickle.PickleOfMetadata().load(file).storage_data
    except ConfigError:
        raise
    except Exception as error:  # a truncated pickle raises nearly anything
        return f"{index} is not readable ({type(error).__name__})"
    needed: dict[str, int] = {}
    for info in stored.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size < size:
            return f"{path} holds {path.stat().st_size} of {size} bytes"
    return ""


def asked(args: argparse.Namespace) -> int | None:
    """The iteration that --ckpt-step asks for; None where `take` has chosen it."""
    return None if getattr(args, "cp_ring_fell_back", False) else getattr(args, "ckpt_step", None)


def candidates(load: Path, wanted: int | None) -> tuple[list[int], int | None]:
    """Iterations to try in this order, and the one that Megatron would load by itself.

    That one comes first, then those before it, the newest first. Where the tracker is gone or broken, they are all that are
    there; where it is gone, only those with a manifest, so that nothing unfinished is taken.
    """
    if wanted:
        return [wanted], wanted
    latest, there = tracked_iteration(load), folders.saved(load)
    if latest is not None:
        return [latest, *(number for number in reversed(there) if number < latest)], latest
    if folders.tracker_is_broken(load):
        return there[::-1], None
    if (load / folders.TRACKER).is_file():  # that of a release
        return [], None
    return [number for number in reversed(there) if (folders.folder_of(load, number) / manifest.NAME).is_file()], None


_chosen: dict[str, int] = {}


def chosen(load: Path) -> int | None:
    """The iteration that `take` has chosen for this folder, or None."""
    return _chosen.get(str(load))


def take(args: argparse.Namespace, load: Path, number: int, latest: int | None, problem: str) -> None:
    """Makes Megatron load iteration `number`, and says so where it would load another by itself."""
    if asked(args):
        return
    if number == latest:
        if getattr(args, "cp_ring_fell_back", False):
            args.ckpt_step = None
        return
    if problem:
        first = f"the checkpoint of iteration {latest}" if latest is not None else "the newest checkpoint"
        note(f"{first} is half written or damaged ({problem}); resuming from iteration {number}")
    else:
        state = "names no iteration" if folders.tracker_is_broken(load) else "is missing"
        note(f"{load / folders.TRACKER} {state}; resuming from iteration {number}, the last good one")
    args.ckpt_step, args.cp_ring_fell_back = number, True
    _chosen[str(load)] = number


def nothing_whole(args: argparse.Namespace, load: Path, problem: str) -> str:
    """The line that refuses a folder without a whole checkpoint, or the one that --ckpt-step asks for."""
    if asked(args):
        return f"--ckpt-step {asked(args)}: the checkpoint is half written or damaged: {problem}"
    return f"--load {load}: no checkpoint in it is whole ({problem}): give another folder"


def choose(args: argparse.Namespace) -> None:
    """Makes Megatron load the newest whole checkpoint of --load where the latest one is half written, and says so.

    Sets `args.ckpt_step`; deletes nothing. It looks at sizes; `cp_ring.megatron.checkpoints` computes checksums when it loads.

    Raises `ConfigError` if there are checkpoints but none is whole, or if the one that --ckpt-step asks for is not.
    """
    if not getattr(args, "load", None) or "://" in str(args.load):
        return
    load, problem = Path(args.load), ""
    numbers, latest = candidates(load, asked(args))
    for number in numbers:
        found = defect(folders.folder_of(load, number))
        if not found:
            take(args, load, number, latest, problem)
            return
        problem = problem or found
    if numbers:
        raise ConfigError(nothing_whole(args, load, problem))


def check_model(args: argparse.Namespace) -> None:
    """The checkpoint that will be loaded holds a model of the shape that the flags describe; raises `ConfigError` otherwise."""
    if not getattr(args, "load", None):
        return
    iteration = getattr(args, "ckpt_step", None) or tracked_iteration(Path(args.load))
    saved = _saved_args(folders.folder_of(Path(args.load), iteration)) if iteration is not None else None
    if saved is None:
        return
    for name, flag in _SHAPE:
        ours, theirs = _value(args, name), _value(saved, name)
        if hasattr(saved, name) and ours != theirs and not (name == "vocab_size" and None in (ours, theirs)):
            raise ConfigError(
                f"{flag}: the checkpoint of iteration {iteration} in --load {args.load} has {name} {theirs}, and this job {ours}"
            )


def _value(args: Any, name: str) -> Any:
    """What `args` say of `name`; None for the query groups of a model without them, where the number has no meaning."""
    if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
        return None
    return getattr(args, name, None)


def _saved_args(folder: Path) -> Any:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    if not (folder / "metadata.json").is_file():
        return None  # a format of old: Megatron reports on it itself
    with unpickle.restricted():
        try:
            return dist_checkpointing.load_common_state_dict(str(folder)).get("args")
        except CheckpointException as error:
            raise unpickle.refusal_within(error) or error from None
