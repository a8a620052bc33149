"""The certificate beside the checkpoints, and what a resumed job must share with it."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.certificate.report import Certificate
from cp_ring.megatron.compat import megatron_version
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.newest_checkpoint import TRACKER
from cp_ring.megatron.rejection import note

NAME = "cp_ring_certificate.json"

# The settings that decide what attention computes. Those of the mask must stay the same when a job
# resumes. Layout, kernel, route and sizes of parallel groups may change, and are not listed.
_MASK = ("window_size", "window_attn_skip_freq", "document_mask", "inter_document_masking")
_OTHERS = (
    "softmax_type",
    "softmax_scale",
    "num_attention_heads",
    "kv_channels",
    "multi_latent_attention",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "mtp_num_layers",
    "mask_kinds",
)
_ARGUMENTS = {
    "document_mask": "cp_ring_document_mask",
    "inter_document_masking": "dataloader_inter_document_masking",
    "mask_kinds": "cp_ring_mask_kinds",
}
"""Arguments with another name than the setting."""
_RING = (
    "kernel",
    "layout",
    "route",
    "schedule",
    "slot_shards",
    "heads",
    "num_slots",
    "wire",
    "wire_dtype",
    "recurrent",
)


def attention_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings in `args` that decide what attention computes, in plain values."""
    values = {name: getattr(args, _ARGUMENTS.get(name, name), None) for name in (*_MASK, *_OTHERS)}
    for name in ("document_mask", "inter_document_masking"):
        values[name] = bool(values[name])
    values["mask_kinds"] = values["mask_kinds"] or ""
    if not values["multi_latent_attention"]:
        # Megatron gives these a value whether they are used or not
        values |= dict.fromkeys(
            ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor")
        )
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Versions, date, sizes, and the settings that the certificate is for, with their hash."""
    values = attention_settings(args)
    used = settings.current()
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "world": args.world_size,
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "sizes": sizes,
        "ring": {name: getattr(used, name) for name in _RING}
        | {"comm_types": comm_types.types_by_layer(args)},
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "attention": values,
        "hash": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16],
    }


def versions() -> dict[str, str]:
    """The versions of cp_ring, megatron-core and torch.

    Megatron adds the git revision of the folder that it lies in, be it Megatron's or another
    project's: that part is left out.
    """
    return {
        "cp_ring": importlib.metadata.version("cp-ring"),
        "megatron-core": Version(megatron_version() or "0").public,
        "torch": torch.__version__,
    }


def save(args: argparse.Namespace, certificate: Certificate) -> None:
    """Writes the certificate into the folder of --save, if there is one, whole or not at all."""
    folder = getattr(args, "save", None)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write(Path(folder) / NAME, certificate)
    except OSError as error:
        note(f"the certificate could not be written to {folder}: {error.strerror}")


def write(path: Path, certificate: Certificate) -> None:
    """Writes the certificate as JSON, whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(certificate.as_dict(), indent=2)
    try:
        aside.write_text(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def check(args: argparse.Namespace) -> None:
    """Compares the job with the certificate beside the checkpoints of --load, if there is one.

    Prints one line about what differs. Raises `ConfigError` where the mask differs: the model was
    trained with another one.
    """
    before = _read(getattr(args, "load", None))
    if before is None:
        return
    now = attention_settings(args)
    changed = {
        name: (before[name], now[name])
        for name in now
        if name in before and before[name] != now[name]
    }
    masks = [name for name in _MASK if name in changed]
    if masks:
        raise ConfigError(
            f"--load {args.load}: its certificate is for another mask "
            f"({_shown(changed, masks)}); give the same, or remove {NAME} there if the "
            "change is meant"
        )
    if changed:
        note(
            f"the checkpoints in --load {args.load} are certified for other attention: "
            f"{_shown(changed, list(changed))}"
        )


def _shown(changed: dict[str, tuple[Any, Any]], names: list[str]) -> str:
    return ", ".join(
        f"--{_ARGUMENTS.get(name, name).replace('_', '-')} was {changed[name][0]}, now "
        f"{changed[name][1]}"
        for name in names
    )


def _read(folder: str | None) -> dict[str, Any] | None:
    """The settings that the certificate in `folder` is for; None if there is no checkpoint or no
    certificate there.
    """
    if not folder or not (Path(folder) / TRACKER).is_file():
        return None
    path = Path(folder) / NAME
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text())["about"]["attention"])
    except (OSError, ValueError, KeyError, TypeError):
        note(f"{path} is not readable: the job is compared with nothing")
        return None
