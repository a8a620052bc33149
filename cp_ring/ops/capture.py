"""Detects CUDA graphs that are being recorded."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device records a CUDA graph, in which nothing may
    wait for the host or copy from it.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
