"""Ranks that share one GPU, which NCCL before 2.32 does not allow: gloo moves their messages through
host memory.
"""

from dataclasses import dataclass, replace

import torch

from cp_ring.comm import groups
from cp_ring.comm.transport import GroupTransport, MessageBatch, Pending


class OverHost(GroupTransport):
    """Copies what is sent to the host, and what has arrived to the device."""

    def __init__(self, group, device):
        super().__init__(group, torch.device("cpu"))

    def post(self, batch):
        sends, receives = (
            [
                (transfer, [x.to("cpu", copy=True) for x in buffers])
                for transfer, buffers in transfers
            ]
            for transfers in (batch.sends, batch.receives)
        )
        pending = super().post(replace(batch, sends=sends, receives=receives))
        return _Arriving(pending, batch, receives)


@dataclass
class _Arriving:
    pending: Pending
    batch: MessageBatch
    arrived: list

    def wait(self):
        self.pending.wait()
        pairs = zip(self.batch.receives, self.arrived, strict=True)
        self.batch, self.arrived = MessageBatch((), ()), []
        for (transfer, buffers), (_, on_host) in pairs:
            for start, end in transfer.ranges:
                for x, y in zip(buffers, on_host, strict=True):
                    x[start:end].copy_(y[start:end])


def use():
    """Take the groups of gloo for tensors on a GPU from now on."""
    groups.GroupTransport, groups.backend_of = OverHost, lambda group, device: "over the host"
