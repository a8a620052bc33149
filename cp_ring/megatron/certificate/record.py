"""Writes the certificate beside the checkpoints: the probed job and the results."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from cp_ring.megatron import settings
from cp_ring.megatron.certificate.report import Certificate
from cp_ring.megatron.compat import megatron_version
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.rejection import note

NAME = "cp_ring_certificate.json"

_ARGUMENTS = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size world_size
    num_attention_heads kv_channels multi_latent_attention window_size window_attn_skip_freq
    softmax_type softmax_scale position_embedding_type rotary_base rotary_percent mtp_num_layers
    cp_ring_document_mask cp_ring_mask_kinds
"""


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return date, versions, sizes, and the settings on which attention depends."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "cp_ring": importlib.metadata.version("cp-ring"),
            # Megatron adds the git revision of the folder that it lies in, which may be that of
            # another project
            "megatron-core": Version(megatron_version() or "0").public,
            "torch": torch.__version__,
        },
        "ring": vars(settings.current()) | {"comm_types": comm_types.types_by_layer(args)},
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "arguments": {name: getattr(args, name, None) for name in _ARGUMENTS.split()},
    }


def save(args: argparse.Namespace, certificate: Certificate) -> None:
    """Write the certificate as JSON into the folder of --save, if there is one."""
    folder = getattr(args, "save", None)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = json.dumps(certificate.as_dict(), indent=2, default=str)
        (Path(folder) / NAME).write_text(text)
    except OSError as error:
        note(f"the certificate could not be written to {folder}: {error.strerror}")
