"""Messages of CUDA tensors over gloo, through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import override

import torch
from torch import Tensor

from cp_ring.comm.transport import DONE, Buffer, GroupTransport, MessageBatch, Pending
from cp_ring.plan.records import Transfer


class StagedTransport(GroupTransport):
    """A transport for CUDA tensors on a gloo group: messages pass through pinned host memory, which
    is slow.
    """

    @override
    def post(self, batch: MessageBatch) -> Pending:
        """Wait until the device has computed the tensors that are sent, then start all messages."""
        if not batch:
            return DONE
        sends = [(t.packed(), [_to_host(x, t) for x in buffers]) for t, buffers in batch.sends]
        receives = [
            (t.packed(), [_on_host(x, t) for x in buffers]) for t, buffers in batch.receives
        ]
        for device in {x.device for _, buffers in batch.sends for x in buffers}:
            torch.cuda.current_stream(device).synchronize()
        return _Staged(
            super().post(replace(batch, sends=sends, receives=receives)),
            receives,
            batch.receives,
        )


class _Staged:
    def __init__(
        self,
        pending: Pending,
        staged: Sequence[tuple[Transfer, Buffer]],
        wanted: Sequence[tuple[Transfer, Buffer]],
    ):
        self._pending, self._staged, self._wanted = pending, staged, wanted

    def wait(self) -> None:
        self._pending.wait()
        for (packed, sources), (transfer, targets) in zip(self._staged, self._wanted, strict=True):
            for source, target in zip(sources, targets, strict=True):
                for (first, last), (start, end) in zip(packed.ranges, transfer.ranges, strict=True):
                    target[start:end].copy_(source[first:last])


def _on_host(x: Tensor, transfer: Transfer) -> Tensor:
    """Return pinned memory for the tokens of x that the transfer moves, one range after the
    other.
    """
    return torch.empty(
        (transfer.tokens, *x.shape[1:]), dtype=x.dtype, device="cpu", pin_memory=True
    )


def _to_host(x: Tensor, transfer: Transfer) -> Tensor:
    host = _on_host(x, transfer)
    for (first, last), (start, end) in zip(transfer.packed().ranges, transfer.ranges, strict=True):
        host[first:last].copy_(x[start:end], non_blocking=True)
    return host
