"""What a CUDA graph of ring attention needs: no new call, no message on its way. tests/fakegpu captures
graphs.
"""

import warnings

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import work
from cp_ring.observe import watchdog
from cp_ring.observe.watchdog import Watch
from cp_ring.ops.capture import capturing
from cp_ring.testing.oracle import Case
from tests.loopback import LoopbackTransport
from tests.rings import said

N, H, G = 32, 4, 2


def test_a_capture_does_not_begin_with_a_new_call(monkeypatch):
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 1))
    q, k, v, _ = Case.draw(N, h=H, g=G)
    monkeypatch.setattr(work, "capturing", lambda device: True)
    assert "this call of ring attention is new, and a CUDA graph cannot begin with it" in said(
        ring_attention, q, k, v, LoopbackTransport(0, 1), plan=plan
    )
    monkeypatch.undo()
    ring_attention(q, k, v, LoopbackTransport(0, 1), plan=plan)
    monkeypatch.setattr(work, "capturing", lambda device: True)
    ring_attention(q, k, v, LoopbackTransport(0, 1), plan=plan)


def test_the_watchdog_does_not_ask_a_device_that_captures(monkeypatch):
    class OnDevice:
        is_cuda, device = True, torch.device("cuda")

    batch = type(
        "Batch", (), {"receives": [(None, [OnDevice()])], "sends": [], "kind": "keys", "hop": 1}
    )()
    group = LoopbackTransport(0, 1)
    (unwatched := Watch()).begin(batch, [])
    assert unwatched.sampled is None, "nobody would free the works"
    monkeypatch.setitem(watchdog._dogs, group, None)
    for captures in (False, True):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures
        )
        monkeypatch.setattr(watchdog, "_describe", lambda *_: {})
        watch = Watch()
        watch.begin(batch, [])
        assert (watch.sampled is not None) is not captures
        assert watch.longest()[0] is batch


@pytest.mark.parametrize(
    "allocator, register, warned",
    [("expandable_segments:True", "", 1), ("expandable_segments:True", "0", 0), ("", "", 0)],
)
def test_a_capture_with_expandable_segments_warns(monkeypatch, allocator, register, warned):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert capturing(torch.device("cuda")) and not capturing(torch.device("cpu"))
    assert len(told) == warned and all("NCCL_GRAPH_REGISTER=0" in str(x) for x in told)
