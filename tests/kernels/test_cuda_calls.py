"""Without a GPU: fake CUDA tensors check the calls of aten kernels against the operators' own
signatures and shapes.

Results are not checked here; tests/gpu does that where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_ring.kernels import _chosen, choose, determinism, flash, flash_aten
from cp_ring.kernels.base import OPEN, Packing, no_random_state
from tests import conformance
from tests.gpu.emulated import CPU, emulated
from tests.kernels.test_flash import stand_in

HEADS = [(4, 4, 64, 64), (8, 2, 60, 36), (8, 2, 192, 128), (4, 1, 128, 128)]


@pytest.fixture(autouse=True)
def _no_kept_fakes():
    """A fake tensor must not outlive its mode."""
    no_random_state.cache_clear()
    yield
    no_random_state.cache_clear()


def test_flash_aten_leaves_torchs_switch_alone(monkeypatch):
    """The operator obeys nothing else, and the switch is that of all threads: so it is rejected
    where determinism is asked of the call alone.
    """
    kind = torch.device("cuda"), torch.bfloat16, 64, 64
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
                q, k, v, dout = tensors(4, 4, 64, 64, 32, 32)
                out, lse = flash_aten.KERNEL.forward(q, k, v, lo=-OPEN, hi=0, scale=0.1)
                flash_aten.KERNEL.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=0, scale=0.1)
        finally:
            switch(False)
    assert flash_aten.KERNEL.rejection(*kind) is None


def tensors(h, g, d, e, queries, keys, dtype=torch.bfloat16):
    q, dout = (
        torch.empty(queries, 2, h, size, dtype=dtype, device="cuda").transpose(0, 1)
        for size in (d, e)
    )
    k, v = (
        torch.empty(keys, 2, g, size, dtype=dtype, device="cuda").transpose(0, 1) for size in (d, e)
    )
    return q, k, v, dout


@pytest.mark.parametrize(("h", "g", "d", "e"), HEADS)
@pytest.mark.parametrize(
    ("name", "band"),
    [("flash_aten", band) for band in ((-OPEN, OPEN), (-OPEN, 0), (-7, 3), (5, OPEN))],
)
def test_dense(name, band, h, g, d, e):
    lo, hi = band
    with FakeTensorMode():
        q, k, v, dout = tensors(h, g, d, e, 32, 32 if hi == 0 else 48)
        kernel = choose(name, device=q.device, dtype=q.dtype, d=d, e=e)
        out, lse = kernel.forward(q, k, v, lo=lo, hi=hi, scale=0.1)
        grads = kernel.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=0.1)
        assert (out.shape, lse.shape, lse.dtype) == (dout.shape, (2, h, 32), torch.float32)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("h", "g", "d", "e"), HEADS)
def test_varlen(h, g, d, e):
    with FakeTensorMode():
        q, k, v, dout = (x[0] for x in tensors(h, g, d, e, 100, 120))
        cu = torch.empty(4, dtype=torch.int32, device="cuda")
        kernel = choose("flash_aten", device=q.device, dtype=q.dtype, d=d, e=e)
        packing = Packing(cu, cu, 50, 60, 9, 0)
        out, lse = kernel.forward_varlen(q, k, v, packing, 0.1)
        grads = kernel.backward_varlen(dout, q, k, v, out, lse, packing, 0.1)
        assert (out.shape, lse.shape, lse.dtype) == (dout.shape, (h, 100), torch.float32)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("deterministic", [False, True])
def test_efficient_attention_of_wide_heads(deterministic):
    """Copies of key/value heads, sizes padded, and lse to a multiple of 32, as on a GPU."""
    heads = [(4, 2, 512, 512), (2, 2, 20, 36)]
    with emulated(), determinism(deterministic):
        kernel = choose("efficient", device=CPU, dtype=torch.bfloat16, d=512, e=512)
        conformance.check(kernel, CPU, torch.bfloat16, heads=heads)


def test_order_on_cuda_and_rejections():
    cuda = torch.device("cuda")

    def auto(d, e, dtype=torch.bfloat16, **more):
        return choose("auto", device=cuda, dtype=dtype, d=d, e=e, **more).name

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
    _chosen.cache_clear()
    cuda = torch.device("cuda")
    of_256 = {"3": "flash", "4": "flash_aten"}[version]
    for size, wanted in ((128, "flash"), (256, of_256), (512, "efficient")):
        assert choose("auto", device=cuda, dtype=torch.bfloat16, d=size, e=size).name == wanted
    _chosen.cache_clear()
