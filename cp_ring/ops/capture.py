"""Detects CUDA graphs that are being recorded."""

from __future__ import annotations

import os
import warnings

import torch


def capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device records a CUDA graph, in which nothing may
    wait for the host or copy from it. Warn if the messages of its replays would use memory that
    NCCL has registered and torch has unmapped.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return False
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    registers = os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    if registers and "expandable_segments:True" in (allocator or ""):
        warnings.warn(
            "a CUDA graph holds messages, and expandable_segments:True moves their memory: set "
            "NCCL_GRAPH_REGISTER=0",
            stacklevel=2,
        )
    return True
