"""What can be said of a saved checkpoint before any process group exists: whether it is whole, and which model it holds."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.refuse import note

_TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7})")

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
    tracker = load / _TRACKER
    word = tracker.read_text().strip() if tracker.is_file() else ""
    return int(word) if word.isdigit() else None


def defect(folder: Path) -> str:
    """Why the checkpoint `folder` (iter_N) is not whole, or "". Only Megatron's torch_dist format is looked into."""
    if not folder.is_dir():
        return f"{folder} does not exist"
    about = folder / "metadata.json"
    if not about.is_file():
        legacy = any(folder.glob("mp_rank_*"))
        return "" if legacy else f"{about} is missing"
    try:
        backend = json.loads(about.read_text()).get("sharded_backend")
    except ValueError:
        return f"{about} is not readable"
    return _torch_dist_defect(folder) if backend == "torch_dist" else ""


def _torch_dist_defect(folder: Path) -> str:
    index = folder / ".metadata"
    if not index.is_file():
        return f"{index} is missing"
    try:
        with index.open("rb") as file:
            stored = pickle.load(file).storage_data
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


def choose(args: argparse.Namespace) -> None:
    """Makes Megatron load the newest whole checkpoint of --load where the latest one is half written, and says so.

    Sets `args.ckpt_step`; deletes nothing.

    Raises `ConfigError` if there are checkpoints but none is whole, or if the one that --ckpt-step asks for is not.
    """
    if not getattr(args, "load", None):
        return
    load = Path(args.load)
    asked = getattr(args, "ckpt_step", None)
    latest = asked or tracked_iteration(load)
    if latest is None:
        return
    problem = defect(_folder(load, latest))
    if not problem:
        return
    if asked:
        raise ConfigError(f"--ckpt-step {asked}: the checkpoint is half written: {problem}")
    older = sorted((number for number in _saved(load) if number < latest), reverse=True)
    for number in older:
        if not defect(_folder(load, number)):
            note(f"the checkpoint of iteration {latest} is half written ({problem}); resuming from iteration {number}")
            args.ckpt_step = number
            return
    raise ConfigError(f"--load {load}: no checkpoint in it is whole ({problem}): give another folder")


def check_model(args: argparse.Namespace) -> None:
    """The checkpoint that will be loaded holds a model of the shape that the flags describe; raises `ConfigError` otherwise."""
    if not getattr(args, "load", None):
        return
    iteration = getattr(args, "ckpt_step", None) or tracked_iteration(Path(args.load))
    saved = _saved_args(_folder(Path(args.load), iteration)) if iteration is not None else None
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

    if not (folder / "metadata.json").is_file():
        return None  # a format of old: Megatron reports on it itself
    return dist_checkpointing.load_common_state_dict(str(folder)).get("args")


def _folder(load: Path, iteration: int) -> Path:
    return load / f"iter_{iteration:07d}"


def _saved(load: Path) -> list[int]:
    matches = (_FOLDER.fullmatch(path.name) for path in load.iterdir())
    return [int(match.group(1)) for match in matches if match]
