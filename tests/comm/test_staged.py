"""Messages of CUDA tensors over gloo pass through host memory: only the rows that move, and only
when there are some.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from cp_ring.comm import transport
from cp_ring.comm.transport import Done, MessageBatch, StagedTransport
from cp_ring.plan.tables import Transfer


def test_only_moved_rows_pass_through_the_host(monkeypatch):
    made, waits, posted = [], [], []

    def empty(shape, dtype, device, pin_memory):
        assert device == "cpu", (
            "torch.set_default_device may name a GPU, whose memory cannot be pinned"
        )
        return made.append(shape) or torch.zeros(shape)

    monkeypatch.setattr(transport.torch, "empty", empty)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(synchronize=lambda: waits.append(device)),
    )
    monkeypatch.setattr(
        transport.GroupTransport, "post", lambda self, batch: posted.append(batch) or Done()
    )
    staged = object.__new__(StagedTransport)
    assert isinstance(staged.post(MessageBatch([], [])), Done)
    assert not made
    assert not waits

    keys, values = torch.arange(24.0).view(12, 2), torch.arange(36.0).view(12, 3)
    target = torch.full((12, 2), -1.0), torch.full((12, 3), -1.0)
    out, back = Transfer(1, ((2, 4), (7, 10))), Transfer(1, ((0, 2), (5, 8)))
    pending = staged.post(MessageBatch([(out, (keys, values))], [(back, target)]))
    assert made == [(5, 2), (5, 3), (5, 2), (5, 3)]
    assert waits == [torch.device("cpu")]
    batch = posted[-1]
    wanted = transport.messages([(out, (keys, values))])
    for (peer, rows), (_, x) in zip(transport.messages(batch.sends), wanted, strict=True):
        assert peer == 1
        assert torch.equal(rows, x)
    for number, (_, rows) in enumerate(transport.messages(batch.receives)):
        rows.fill_(number)
    pending.wait()
    assert [x[:, 0].tolist() for x in target] == [
        [a, a, -1, -1, -1, b, b, b, -1, -1, -1, -1] for a, b in ((0, 2), (1, 3))
    ]
