"""NCCL runs a rank's batches one after another on its stream, and sends contiguous memory alone;
gloo does neither.

Each rank of a ring is played in turn, and what it posts is noted. Then all ranks' batches run as
NCCL would run them.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.comm.transport import messages
from tests.loopback import LoopbackTransport

CP, N = 4, 64
MASKS = {
    "causal": Mask.causal(N),
    "window": Mask.causal(N, window=(N // 5, 0)),
    "documents": Mask.documents([0, 3, 5, N // 3, N - 9, N]),
}


class Noting(LoopbackTransport):
    """Notes for each batch its messages: (peer, whether it is sent, shape and dtype)."""

    def __init__(self, rank: int):
        super().__init__(rank, CP)
        self.batches = []

    def post(self, batch):
        both = [(False, messages(batch.receives)), (True, messages(batch.sends))]
        noted = [
            (peer, sent, (part.shape, part.dtype)) for sent, each in both for peer, part in each
        ]
        assert all(part.is_contiguous() and part.numel() for _, each in both for _, part in each)
        self.batches += [noted] if noted else []
        return super().post(batch)


def batches_of(plan, rank: int, **options):
    transport = Noting(rank)
    q, k, v = (torch.randn(N // CP, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = ring_attention(q, k, v, transport, plan=plan, qkv_format="sbhd", **options)
    torch.autograd.grad(out.sum(), (q, k, v))
    return transport.batches


def run_in_order(ranks) -> None:
    """Between two ranks messages meet in the order of their batches, and a batch begins when the
    one before is complete.
    """
    ends, numbers = defaultdict(dict), defaultdict(int)
    for rank, batches in enumerate(ranks):
        for place, batch in enumerate(batches):
            for peer, sent, what in batch:
                pair = (rank, peer) if sent else (peer, rank)
                ends[*pair, numbers[pair, sent]][sent] = rank, place, what
                numbers[pair, sent] += 1
    assert all(len(both) == 2 and both[False][2] == both[True][2] for both in ends.values())
    open_, now = list(ends.values()), [0] * CP
    while open_:
        waiting = [
            both for both in open_ if any(now[rank] != place for rank, place, _ in both.values())
        ]
        held = {(rank, place) for both in waiting for rank, place, _ in both.values()}
        after = [
            next((i for i in range(now[r], len(b)) if (r, i) in held), len(b))
            for r, b in enumerate(ranks)
        ]
        assert len(waiting) < len(open_), f"ranks wait for one another: {now}"
        open_, now = waiting, after


def plans(names, routes, schedules):
    for name in names:
        for route in routes:
            for schedule in schedules if route == "direct" else ["auto"]:
                yield (
                    f"{name} {route} {schedule}",
                    Plan.build(
                        MASKS[name],
                        Layout.zigzag(N, CP),
                        route=route,
                        schedule=schedule,
                        slot_shards=CP,
                    ),
                )
        yield f"{name} over heads", Plan.build(MASKS[name], Layout.zigzag(N, CP), ulysses=2)


@pytest.mark.parametrize("wire", ["plain", "int8"])
def test_batches_of_all_ranks_complete_in_order(wire):
    for _, plan in plans(["documents"], ["direct"], ["auto"]):
        run_in_order([batches_of(plan, rank, wire=wire) for rank in range(CP)])


def test_every_route_and_schedule():
    for name, plan in plans(MASKS, ["direct", "ring"], ["ring", "auto", "gather"]):
        for slots in (2, 3):
            try:
                run_in_order([batches_of(plan, rank, num_slots=slots) for rank in range(CP)])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_batches_in_two_orders_never_complete():
    """The check sees what gloo would not: two ranks whose batches are complete only together with a
    later one of the other.
    """
    to, back = (1, True, "x"), (1, False, "x")
    other_to, other_back = (0, True, "x"), (0, False, "x")
    run_in_order([[[to], [back]], [[other_back], [other_to]], [], []])
    with pytest.raises(AssertionError, match="wait for one another"):
        run_in_order([[[to], [back]], [[other_to], [other_back]], [], []])
