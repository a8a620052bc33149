"""The adapters of torch's own operators without a GPU: conformance with operators that compute on the
CPU, and the order of kernels. tests/fakegpu calls the operators themselves.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_ring.kernels import choose, determinism, efficient, flash, flash_aten
from cp_ring.kernels.base import OPEN, deterministic
from cp_ring.kernels.reference import KERNEL as REFERENCE
from tests import conformance
from tests.kernels import test_flash
from tests.kernels.test_flash import stand_in

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_flash_aten_leaves_torchs_switch_alone(monkeypatch):
    """The operator obeys nothing else, and the switch is that of all threads: so it is rejected
    where determinism is asked of the call alone.
    """
    kind = CUDA, torch.bfloat16, 64, 64
    switch = torch.use_deterministic_algorithms
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)
    with determinism(True):
        assert "torch.use_deterministic_algorithms(True)" in flash_aten.KERNEL.rejection(*kind)
        switch(True, warn_only=True)  # with which the operator warns, and is not deterministic
        assert "torch.use_deterministic_algorithms(True)" in flash_aten.KERNEL.rejection(*kind)
        switch(True)
        try:
            assert flash_aten.KERNEL.rejection(*kind) is None
            with FakeTensorMode():
                q, k, v, dout = (
                    torch.empty(1, 32, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)
                )
                out, lse = flash_aten.KERNEL.forward(q, k, v, lo=-OPEN, hi=0, scale=0.1)
                flash_aten.KERNEL.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=0, scale=0.1)
        finally:
            switch(False)
    assert flash_aten.KERNEL.rejection(*kind) is None


class _OnCpu:
    def rejection(self, device, *kind):
        return super().rejection(CUDA if device.type == "cpu" else device, *kind)


class FlashAten(_OnCpu, flash_aten.FlashAtenKernel): ...


class Efficient(_OnCpu, efficient.EfficientKernel): ...


def of_flash(q, k, v, lengths, scale, window):
    """The arguments of torch's operator by flash-attn's names."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    window = window["window_size_left"], window["window_size_right"]
    values = {"q": q, "k": k, "v": v, "window_size": window, "softmax_scale": scale}
    return values | dict(zip(names, lengths, strict=True))


def flash_forward(q, k, v, *rest, scale, **window):
    return test_flash.forward("3", of_flash(q, k, v, rest[:4], scale, window))[:2]


def flash_backward(dout, q, k, v, out, lse, *rest, scale, **window):
    grads = [torch.empty_like(x) for x in (q, k, v)]
    given = {"dout": dout, "out": out, "lse": lse, "deterministic": deterministic()}
    given |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    test_flash.backward("3", of_flash(q, k, v, rest[:4], scale, window) | given)
    return grads


def efficient_forward(q, k, v, *rest, scale):
    """Tensors [b, s, heads, size] of as many heads; lse [b, h, a multiple of 32]."""
    assert q.shape[2] == k.shape[2] and q.shape[3] % 8 == v.shape[3] % 8 == 0
    assert rest[:6] == (None,) * 5 + (0.0,) and rest[7]
    out, lse = REFERENCE.forward(q, k, v, lo=-OPEN, hi=0 if rest[6] else OPEN, scale=scale)
    lse = torch.nn.functional.pad(lse.float(), (0, -lse.shape[2] % 32), value=torch.nan)
    return out.to(q.dtype), lse


def efficient_backward(dout, q, k, v, bias, out, *rest, scale, num_splits_key):
    (_, _, queries, keys, lse), causal = rest[:5], rest[8]
    assert (queries, keys, lse.shape[2] % 32) == (q.shape[1], k.shape[1], 0)
    assert num_splits_key == (1 if deterministic() else None)
    band = {"lo": -OPEN, "hi": 0 if causal else OPEN, "scale": scale}
    grads = REFERENCE.backward(dout, q, k, v, out, lse[..., :queries], **band)
    return *(x.to(q.dtype) for x in grads), None


FLASH = FlashAten(), flash_aten, flash_forward, flash_backward
EFFICIENT = Efficient(), efficient, efficient_forward, efficient_backward


@pytest.mark.parametrize(
    "operators, heads, exact",
    [
        (FLASH, [(4, 2, 16, 24)], False),
        # copies of key/value heads, sizes padded, and lse to a multiple of 32
        (EFFICIENT, [(4, 2, 512, 512), (2, 2, 20, 36)], False),
        (EFFICIENT, [(2, 2, 20, 36)], True),
    ],
    ids=["flash_aten", "efficient", "efficient, deterministic"],
)
def test_conformance_with_operators_that_compute_on_the_cpu(monkeypatch, operators, heads, exact):
    kernel, module, forward, backward = operators
    monkeypatch.setattr(module, "_attention", forward)
    monkeypatch.setattr(module, "_attention_backward", backward)
    with determinism(exact):
        conformance.check(kernel, CPU, torch.bfloat16, heads=heads)


def test_order_on_cuda_and_rejections():
    def auto(d, e, dtype=torch.bfloat16, **more):
        return choose("auto", device=CUDA, dtype=dtype, d=d, e=e, **more).name

    assert auto(64, 64) == auto(64, 64, packed=True) == auto(256, 192) == "flash_aten"
    with determinism(True):
        assert auto(64, 64) == "efficient"
        torch.use_deterministic_algorithms(True)
        try:
            assert auto(64, 64) == "flash_aten"
        finally:
            torch.use_deterministic_algorithms(False)
    assert auto(64, 64, torch.float32) == "reference"
    assert auto(512, 512) == "efficient"


@pytest.mark.parametrize("version", ["3", "4"])
def test_flash_attn_comes_before_torchs_own_kernels_where_it_fits(version, monkeypatch):
    """Without TransformerEngine."""
    made = stand_in("3: flash-attn August 2026" if version == "3" else "4: flash-attn August 2026")
    monkeypatch.setattr(flash, "_installed", lambda: made.functions)
    of_256 = {"3": "flash", "4": "flash_aten"}[version]
    for size, wanted in ((128, "flash"), (256, of_256), (512, "efficient")):
        assert choose("auto", device=CUDA, dtype=torch.bfloat16, d=size, e=size).name == wanted
