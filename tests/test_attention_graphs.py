"""What a CUDA graph of ring attention needs: no new call, no message on its way. tests/fakegpu captures
graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cp_ring
from cp_ring import Layout, Mask, Plan, PlanError, ring_attention
from cp_ring.kernels import calls
from cp_ring.observe import watchdog
from cp_ring.observe.watchdog import Watch
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.loopback import LoopbackTransport

N, H, G = 32, 4, 2
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (9, 0)},
    "ring route": {"route": "ring"},
    "heads": {"heads": 2},
    "three slots": {"num_slots": 3, "schedule": "ring"},
    "fp8": {"wire": "fp8"},
}


def test_a_capture_does_not_begin_with_a_new_call(monkeypatch):
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 1))
    q, k, v, _ = Case.draw(N, h=H, g=G)
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    with pytest.raises(
        PlanError, match="this call of ring attention is new, and a CUDA graph cannot begin with it"
    ):
        ring_attention(q, k, v, LoopbackTransport(0, 1), plan=plan)
    monkeypatch.undo()
    ring_attention(q, k, v, LoopbackTransport(0, 1), plan=plan)
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    ring_attention(q, k, v, LoopbackTransport(0, 1), plan=plan)


class Counting(LoopbackTransport):
    """Counts batches that were posted, and those that were waited for."""

    posted = waited = 0

    def post(self, batch: Any) -> Any:
        pending, self.posted = super().post(batch), self.posted + bool(batch)
        if not batch:
            return pending
        return type("Pending", (), {"wait": self.wait})()

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("name", CASES)
def test_every_message_is_waited_for(name):
    """The stream of the messages joins that of the capture: after forward, and after backward,
    nothing is on its way.
    """
    arguments, case = CASES[name] | {"causal": True}, Case.draw(N, h=H, g=G)

    def of_rank(group: Any) -> None:
        leaves = [x.requires_grad_() for x in cp_ring.shard(case[:3], group=group)]
        dout = cp_ring.shard(case.dout, group=group)
        ring_attention(*leaves, group, **arguments)
        transport = Counting(group.rank, 4)
        out = ring_attention(*leaves, transport, **arguments)
        forward = transport.posted
        assert forward and transport.waited == forward
        torch.autograd.grad(out, leaves, dout)
        assert transport.posted > forward and transport.waited == transport.posted

    LocalRing(4).run(of_rank)


def test_the_watchdog_does_not_ask_a_device_that_captures(monkeypatch):
    class OnDevice:
        is_cuda, device = True, torch.device("cuda")

    batch = type(
        "Batch", (), {"receives": [(None, [OnDevice()])], "sends": [], "kind": "keys", "hop": 1}
    )()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for captures in (False, True):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures
        )
        monkeypatch.setattr(watchdog, "_describe", lambda *_: {})
        watch = Watch()
        watch.begin(batch, [])
        assert (watch.sampled is not None) is not captures
        assert watch.longest()[0] is batch
