"""A call passes at most eight Python frames of cp_ring from the public function to the library that
computes.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from cp_ring import ring_attention
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.window import WindowKernel
from cp_ring.testing.oracle import Case

FRAMES = 8
seen: dict[str, list[str]] = {}


def note(what: str) -> None:
    """Notes the functions of cp_ring that are being called, the outermost first."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("cp_ring."):
            names.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    if len(names) >= len(seen.get(what, [])):
        seen[what] = names


class Probe(WindowKernel):
    """Built as the adapters of flash-attn are, the deepest ones; the library that it calls is the
    reference kernel.
    """

    name = "probe"

    def rejection(self, device, dtype, d, e):
        return None

    def attend(self, q, k, v, window):
        _, right, packing, scale = window
        note("forward, packed" if packing else "forward, single")
        if packing:
            return REFERENCE.forward_varlen(q, k, v, packing, scale)
        return REFERENCE.forward(
            q, k, v, lo=-(1 << 40), hi=0 if right == 0 else 1 << 40, scale=scale
        )

    def gradients(self, dout, q, k, v, out, lse, window):
        _, right, packing, scale = window
        note("backward, packed" if packing else "backward, single")
        if packing:
            return REFERENCE.backward_varlen(dout, q, k, v, out, lse, packing, scale)
        return REFERENCE.backward(
            dout, q, k, v, out, lse, lo=-(1 << 40), hi=0 if right == 0 else 1 << 40, scale=scale
        )


@pytest.mark.parametrize("documents", [[0, 24], [0, 7, 15, 24]], ids=["single", "packed"])
def test_frames_from_the_call_to_the_kernel(monkeypatch, documents):
    module = types.ModuleType("tests_probe_kernel")
    module.KERNEL = Probe()
    monkeypatch.setitem(sys.modules, "tests_probe_kernel", module)
    monkeypatch.setitem(REGISTRY, "probe", "tests_probe_kernel")
    seen.clear()
    q, k, v, dout = Case.draw(24, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(
        ring_attention(q, k, v, cu_seqlens=documents, causal=True, kernel="probe"), inputs, dout
    )
    kind = "single" if len(documents) == 2 else "packed"
    assert set(seen) == {f"forward, {kind}", f"backward, {kind}"}
    forward, backward = seen[f"forward, {kind}"], seen[f"backward, {kind}"]
    assert forward[:4] == [
        "ring_attention",
        "Attention.__call__",
        "RingAttention.forward",
        "_run_forward",
    ]
    # Backward is called by autograd; what it has above is the test.
    assert backward[:2] == ["RingAttention.backward", "_run_backward"]
    assert len(forward) <= FRAMES and len(backward) <= FRAMES
