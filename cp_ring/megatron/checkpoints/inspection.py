"""Looks at saved checkpoints before any process group exists: is it whole, and does it hold the
model that the flags describe?
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import files, folders, gates, manifest
from cp_ring.megatron.rejection import error_within, note
from cp_ring.runtime import RUNTIME

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


def defect(folder: Path) -> str:
    """Why the checkpoint `folder` (iter_N) is not whole, or "", without computing checksums."""
    return manifest.defect(folder, checksums=False) or structure_defect(folder)


def structure_defect(folder: Path) -> str:
    """As `defect`, by the checkpoint's own index alone. Only Megatron's formats torch_dist and
    fsdp_dtensor are looked into.

    Raises `ConfigError` if the index is a pickle that could run code.
    """
    if not folder.is_dir():
        return f"{folder} does not exist"
    special = next(
        (
            path
            for path in sorted(folder.rglob("*"))
            if path.exists() and not (path.is_file() or path.is_dir())
        ),
        None,
    )
    if special is not None:
        return f"{special} is not a regular file"
    about = folder / "metadata.json"
    if not about.is_file():
        if any(folder.glob("mp_rank_*")):
            return ""
        return _torch_dist_defect(folder) if _is_fsdp_dtensor(folder) else f"{about} is missing"
    try:
        backend = files.read_json(about, 1 << 20).get("sharded_backend")
    except (OSError, ValueError):
        return f"{about} is not readable"
    return _torch_dist_defect(folder) if backend == "torch_dist" else ""


def _torch_dist_defect(folder: Path) -> str:
    index = folder / ".metadata"
    if not index.is_file():
        return f"{index} is missing"
    try:
        needed = _needed_bytes(index)
    except ConfigError:
        raise
    except Exception as error:  # a truncated pickle raises nearly anything
        return f"{index} is not readable ({type(error).__name__})"
    for name, size in sorted(needed.items()):
        path = folder / name
        if os.path.basename(name) != name or name in ("", ".", ".."):
            return f"{index} names the file {name!r:.60}, which is outside of the checkpoint"
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size < size:
            return f"{path} holds {path.stat().st_size} of {size} bytes"
    return ""


def _is_fsdp_dtensor(folder: Path) -> bool:
    """Whether the index is that of a checkpoint of Megatron's FSDP, where everything is an entry;
    raises `ConfigError` as `structure_defect` does."""
    try:
        known = _index(folder / ".metadata").state_dict_metadata
        return {"args", "iteration", "checkpoint_version"} <= set(known)
    except ConfigError:
        raise
    except Exception:  # no index, or one that is cut off
        return False


def _index(path: Path) -> Any:
    with files.open_regular(path) as file:
        return gates.PickleOfIndex().load(file)


def _needed_bytes(index: Path) -> dict[str, int]:
    """How long each file that the index names has to be."""
    stored = _index(index).storage_data
    needed: dict[str, int] = {}
    for info in stored.values():
        if (
            not isinstance(info.relative_path, str)
            or type(info.offset) is not int
            or type(info.length) is not int
        ):
            raise TypeError("an entry of the index is not one")
        needed[info.relative_path] = max(
            needed.get(info.relative_path, 0), info.offset + info.length
        )
    return needed


def requested_iteration(args: argparse.Namespace) -> int | None:
    """The iteration that --ckpt-step asks for; None where `_load_iteration` has set it."""
    return None if getattr(args, "cp_ring_fell_back", False) else getattr(args, "ckpt_step", None)


def candidates(load: Path, wanted: int | None) -> tuple[list[int], int | None]:
    """The iterations to try, in this order, and the one that Megatron would load by itself.

    Megatron's choice comes first, then the iterations before it, the newest first. Where the
    tracker is broken, all iterations are candidates; where it is gone, only those with a manifest,
    so that nothing unfinished is loaded.
    """
    if wanted:
        return [wanted], wanted
    latest = folders.tracked(load)
    there = folders.published(load)
    if latest is not None:
        return [latest, *(number for number in reversed(there) if number < latest)], latest
    if folders.tracker_is_broken(load):
        return there[::-1], None
    if (load / folders.TRACKER).is_file():  # that of a release
        return [], None
    return [
        number
        for number in reversed(there)
        if (folders.folder_of(load, number) / manifest.NAME).is_file()
    ], None


_fallbacks: dict[str, int] = RUNTIME.keep({})


def fallback_iteration(load: Path) -> int | None:
    """The iteration that is chosen for this folder in place of Megatron's choice, or None."""
    return _fallbacks.get(str(load))


def _load_iteration(
    args: argparse.Namespace, load: Path, number: int, latest: int | None, problem: str
) -> None:
    """Makes Megatron load iteration `number`, and says so where Megatron would load another one,
    `latest`, by itself.

    problem: what is wrong with the checkpoint of `latest`, or "" where there is none.
    """
    if requested_iteration(args):
        return
    if number == latest:
        if getattr(args, "cp_ring_fell_back", False):
            args.ckpt_step = None
        return
    if problem:
        first = (
            f"the checkpoint of iteration {latest}"
            if latest is not None
            else "the newest checkpoint"
        )
        note(f"{first} is half written or damaged ({problem}); resuming from iteration {number}")
    else:
        state = "names no iteration" if folders.tracker_is_broken(load) else "is missing"
        note(
            f"{load / folders.TRACKER} {state}; resuming from iteration {number}, the last good one"
        )
    args.ckpt_step, args.cp_ring_fell_back = number, True
    _fallbacks[str(load)] = number


def choose(args: argparse.Namespace) -> None:
    """Makes Megatron load the newest whole checkpoint of --load where the latest one is half
    written, and says so.

    Sets `args.ckpt_step`; deletes nothing. Compares sizes only; `checkpoints.loading` computes
    checksums later.

    Raises `ConfigError` if there are checkpoints but none is whole, or if the one that --ckpt-step
    asks for is not.
    """
    if "://" in str(args.load):
        return
    load = Path(args.load)
    choose_first(args, load, candidates(load, requested_iteration(args)), defect)


def choose_first(
    args: argparse.Namespace,
    load: Path,
    numbers: tuple[list[int], int | None],
    defect_of: Callable[[Path], str],
) -> Path | None:
    """The folder of the first of the `candidates` in which `defect_of` sees no defect, which
    Megatron then loads; None where there is no checkpoint. Raises `ConfigError` as `choose`.
    """
    problem, (wanted, latest) = "", numbers
    for number in wanted:
        folder = folders.folder_of(load, number)
        defect = defect_of(folder)
        if not defect:
            _load_iteration(args, load, number, latest, problem)
            return folder
        problem = problem or defect
    if not wanted:
        return None
    if step := requested_iteration(args):
        raise ConfigError(
            f"--ckpt-step {step}: the checkpoint is half written or damaged: {problem}"
        )
    raise ConfigError(
        f"--load {load}: no checkpoint in it is whole ({problem}): give another folder"
    )


def check_model(args: argparse.Namespace) -> None:
    """Raises `ConfigError` unless the checkpoint that will be loaded holds a model of the shape
    that the flags describe.
    """
    iteration = getattr(args, "ckpt_step", None) or folders.tracked(Path(args.load))
    saved = (
        _saved_args(folders.folder_of(Path(args.load), iteration))
        if iteration is not None
        else None
    )
    if saved is None:
        return
    for name, flag in _SHAPE:
        ours = _value(args, name)
        theirs = _value(saved, name)
        if (
            hasattr(saved, name)
            and ours != theirs
            and not (name == "vocab_size" and None in (ours, theirs))
        ):
            raise ConfigError(
                f"{flag}: the checkpoint of iteration {iteration} in --load {args.load} has {name} "
                f"{theirs}, and this job {ours}"
            )


def _value(args: Any, name: str) -> Any:
    """The value of the argument; None for the number of query groups of a model without them."""
    if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
        return None
    return getattr(args, name, None)


def _saved_args(folder: Path) -> Any:
    """The arguments of the job that has written the checkpoint; None in a format that only Megatron
    itself reads.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    if not (folder / "metadata.json").is_file():
        return None
    with gates.restricted():
        try:
            return dist_checkpointing.load_common_state_dict(str(folder)).get("args")
        except CheckpointException as error:
            raise error_within(error) or error from None
