"""Gradients and keys that leave together arrive as they do alone."""

import torch

from cp_ring.comm.groups import transport_for
from cp_ring.comm.transport import Joining, MessageBatch
from cp_ring.observe.counters import record
from cp_ring.plan.records import Transfer


def exchanged(group):
    """The numbers that arrive: gradients and keys together, then gradients alone; and the counts."""
    transport = transport_for(group, torch.device("cpu"))
    joined, rank = Joining(transport), transport.rank
    there, back = (Transfer(1 - rank, ((0, 2),), 0) for _ in range(2))
    sent = [[torch.full((2, 3), 10.0 * rank + kind)] for kind in range(3)]
    came = [[torch.zeros(2, 3)] for _ in range(3)]
    batches = [
        MessageBatch([(there, out)], [(back, into)], kind, 1)
        for out, into, kind in zip(sent, came, ("gradients", "keys", "gradients"), strict=True)
    ]
    with record() as counters:
        first = joined.post(batches[0])
        assert not counters.messages_sent  # held
        keys = joined.post(batches[1])
        last = joined.post(batches[2])
        joined.leave()
    for pending in (first, keys, first, last):
        pending.wait()
    return [float(x[0].sum()) for x in came], counters.bytes_by_kind


def test_gradients_and_keys_leave_together(pool):
    for rank, (found, sizes) in enumerate(pool.run(exchanged, 2)):
        assert found == [6 * (10.0 * (1 - rank) + kind) for kind in range(3)]
        assert sizes == {"gradients": 48, "keys": 24}
