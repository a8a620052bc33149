"""Copies of host tables on devices, made once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_ring.ops.capture import capturing


class _Copy(NamedTuple):
    """A copy, the number of the stream that it was made on, and the event after which others may
    read it.
    """

    tensor: Tensor
    stream: int = 0
    made: torch.cuda.Event | None = None


class Copies:
    """A host table that kernels read. Each device gets a copy when it is first asked for."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self._of: dict[torch.device, _Copy] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the copy for kernels of the current stream. On CUDA no copy blocks the host."""
        copy = self._of.get(device)
        if copy is None:
            copy = self._of[device] = _copy(self.values, device)
        # Before a capture all streams wait.
        if copy.made and _other_stream(copy, device) and not capturing(device):
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copy.made)
            copy.tensor.record_stream(stream)
        return copy.tensor


def _other_stream(copy: _Copy, device: torch.device) -> bool:
    """Return True if the current stream is not that of the copy. Its number takes the host less
    time than an object.
    """
    return torch._C._cuda_getCurrentRawStream(device.index) != copy.stream


def _copy(values: np.ndarray, device: torch.device) -> _Copy:
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return _Copy(host.to(device))
    stream = torch.cuda.current_stream(device)
    tensor = host.pin_memory().to(device, non_blocking=True)
    return _Copy(tensor, stream.cuda_stream, stream.record_event())
