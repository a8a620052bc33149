"""Without a GPU: fake CUDA tensors check the calls of aten kernels against the operators' own
signatures and shapes.

Results are not checked here; tests/gpu does that where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_ring.errors import KernelError
from cp_ring.kernels import choose, cudnn, determinism, flash_aten, versions
from cp_ring.kernels.base import OPEN, Packing, no_random_state
from cp_ring.testing import conformance
from tests.gpu.emulated import CPU, emulated

HEADS = [(4, 4, 64, 64), (8, 2, 60, 36), (8, 2, 192, 128), (4, 1, 128, 128)]


@pytest.fixture(autouse=True)
def _no_kept_fakes():
    """A fake tensor must not outlive its mode."""
    no_random_state.cache_clear()
    yield
    no_random_state.cache_clear()


def test_flash_aten_turns_torchs_switch_on_for_its_backward_alone(monkeypatch):
    """The operator obeys nothing else. What it allocates is not filled first, because it writes all
    of it.
    """
    seen = []
    plain = flash_aten._attention_backward

    def backward(*a, **b):
        seen.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,
            )
        )
        return plain(*a, **b)

    monkeypatch.setattr(flash_aten, "_attention_backward", backward)
    with FakeTensorMode():
        q, k, v, dout = tensors(4, 4, 64, 64, 32, 32)
        for asked in (True, False):
            with determinism(asked):
                out, lse = flash_aten.KERNEL.forward(q, k, v, lo=-OPEN, hi=0, scale=0.1)
                flash_aten.KERNEL.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=0, scale=0.1)
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.utils.deterministic.fill_uninitialized_memory
    assert seen == [(True, False), (False, True)]


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
    [(n, b) for n in ("cudnn", "flash_aten") for b in ((-OPEN, OPEN), (-OPEN, 0))]
    + [("flash_aten", (-7, 3)), ("flash_aten", (5, OPEN))],
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


def test_cudnn_leaves_gradients_that_may_be_nan_to_flash_attention(monkeypatch):
    """On Hopper, full tiles whose keys are 64 modulo 128."""
    seen = []
    for name, module in (("cudnn", cudnn), ("flash_aten", flash_aten)):
        plain = module._attention_backward
        monkeypatch.setattr(
            module,
            "_attention_backward",
            lambda *a, name=name, plain=plain, **b: seen.append(name) or plain(*a, **b),
        )
    shapes = (
        (192, OPEN, 9),
        (64, OPEN, 9),
        (128, OPEN, 9),
        (96, OPEN, 9),
        (192, 0, 9),
        (192, OPEN, 10),
    )
    with FakeTensorMode():
        for keys, hi, capability in shapes:
            monkeypatch.setattr(
                versions, "compute_capability", lambda device, major=capability: (major, 0)
            )
            q, k, v, dout = tensors(8, 2, 192, 128, keys, keys)
            out, lse = cudnn.KERNEL.forward(q, k, v, lo=-OPEN, hi=hi, scale=0.1)
            grads = cudnn.KERNEL.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=hi, scale=0.1)
            assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert seen == ["flash_aten", "flash_aten", "cudnn", "cudnn", "cudnn", "cudnn"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_efficient_attention_of_wide_heads(deterministic):
    """Copies of key/value heads, sizes padded, and lse to a multiple of 32, as on a GPU."""
    heads = [(4, 2, 512, 512), (2, 2, 20, 36)]
    with emulated(), determinism(deterministic):
        kernel = choose("efficient", device=CPU, dtype=torch.bfloat16, d=512, e=512)
        conformance.check(kernel, CPU, torch.bfloat16, heads=heads)


def test_cudnn_leaves_single_queries_and_keys_to_plain_products():
    with FakeTensorMode():
        for queries, keys in ((1, 32), (32, 1), (1, 1)):
            q, k, v, dout = tensors(4, 2, 64, 64, queries, keys)
            kernel = choose("cudnn", device=q.device, dtype=q.dtype, d=64, e=64)
            out, lse = kernel.forward(q, k, v, lo=-OPEN, hi=OPEN, scale=0.1)
            assert out.dtype == torch.float64
            assert [
                x.shape
                for x in kernel.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=OPEN, scale=0.1)
            ] == [
                q.shape,
                k.shape,
                v.shape,
            ]


def test_order_on_cuda_and_rejections():
    cuda = torch.device("cuda")
    assert choose("auto", device=cuda, dtype=torch.bfloat16, d=64, e=64).name == "cudnn"
    with determinism(True):
        assert choose("auto", device=cuda, dtype=torch.bfloat16, d=64, e=64).name == "flash_aten"
        with pytest.raises(KernelError, match="cudnn does not give the same bits in every run"):
            choose("cudnn", device=cuda, dtype=torch.bfloat16, d=64, e=64)
    assert (
        choose("auto", device=cuda, dtype=torch.bfloat16, d=64, e=64, packed=True).name
        == "flash_aten"
    )
    assert choose("auto", device=cuda, dtype=torch.float32, d=64, e=64).name == "reference"
    assert choose("auto", device=cuda, dtype=torch.bfloat16, d=256, e=192).name == "flash_aten"
    assert choose("auto", device=cuda, dtype=torch.bfloat16, d=512, e=512).name == "efficient"
