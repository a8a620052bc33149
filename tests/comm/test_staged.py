"""Messages of CUDA tensors over gloo pass through host memory: only the rows that move, and only
when there are some.
"""

from types import SimpleNamespace

import torch

from cp_ring.comm import transport
from cp_ring.comm.staged import StagedTransport
from cp_ring.comm.transport import Done, MessageBatch, messages
from cp_ring.plan.records import Transfer


def test_only_moved_rows_pass_through_the_host(monkeypatch):
    made, waits = [], []

    def empty(shape, dtype, device, pin_memory):
        assert device == "cpu", (
            "torch.set_default_device may name a GPU, whose memory cannot be pinned"
        )
        return made.append(shape) or torch.zeros(shape)

    def echo(self, batch):
        """What a rank sends comes back to it."""
        for (peer, rows), (_, x) in zip(*map(messages, (batch.receives, batch.sends)), strict=True):
            assert peer == 1
            rows.copy_(x)
        return Done()

    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(transport.GroupTransport, "post", echo)
    staged = object.__new__(StagedTransport)
    assert isinstance(staged.post(MessageBatch([], [])), Done)
    assert not made and not waits

    sent = torch.arange(24.0).view(12, 2), torch.arange(36.0).view(12, 3)
    target = torch.full((12, 2), -1.0), torch.full((12, 3), -1.0)
    out, back = Transfer(1, ((2, 4), (7, 10))), Transfer(1, ((0, 2), (5, 8)))
    staged.post(MessageBatch([(out, sent)], [(back, target)])).wait()
    assert made == [(5, 2), (5, 3), (5, 2), (5, 3)]
    assert waits == ["stream"]
    for x, found in zip(sent, target, strict=True):
        wanted = torch.full_like(x, -1.0)
        wanted[[0, 1, 5, 6, 7]] = x[[2, 3, 7, 8, 9]]
        assert torch.equal(found, wanted)
