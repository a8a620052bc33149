"""The TransformerEngine adapter: against every version's signatures, and a whole ring through an
emulation of them.
"""

import sys

import numpy as np
import pytest
import torch

import cp_ring.kernels.transformer_engine as adapter
from cp_ring import Layout, Mask, Plan
from cp_ring.errors import KernelError
from cp_ring.kernels import choose, determinism, te_library, te_sizes, versions
from cp_ring.kernels.base import OPEN, Packing
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.testing.oracle import Case, logits
from tests import conformance
from tests.kernels import emulated_te
from tests.kernels.emulated_te import KERNEL, SIGNATURES, installed
from tests.rings import attend, error_of, refused

CPU = torch.device("cpu")
VERSIONS = list(SIGNATURES)
CAUSAL = {"lo": -OPEN, "hi": 0, "scale": 0.25}


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_bind_to_every_version(version):
    """Forward and backward, dense and packed, by name to the version's own parameters."""
    with installed(version) as calls:
        conformance.check(
            KERNEL, CPU, torch.bfloat16, only="merged backward", heads=[(4, 2, 16, 16)]
        )
        q, k, v, dout = Case.draw(128, b=2, dtype=torch.bfloat16)
        out, lse = KERNEL.forward(q, k, v, **CAUSAL)
        KERNEL.backward(dout, q, k, v, out, lse, **CAUSAL)
        names = [
            parameter.split("=")[0] for parameter in SIGNATURES[version]["fused_attn_bwd"].split()
        ]
        assert {"thd_thd_thd", "sbhd_sbhd_sbhd"} == {call["qkv_layout"] for call in calls}
        assert ("dqkv_dtype" in names) == ("dqkv_dtype" in calls[-1])


@pytest.mark.parametrize("prop", conformance.PROPERTIES)
def test_conformance(prop):
    with installed("2.20.2"):
        conformance.check(KERNEL, CPU, torch.float16, only=prop)


@pytest.mark.parametrize("version", ["2.14", "2.20.2"])
def test_the_largest_logits_are_those_of_the_library(version):
    """Of all tiles of a call, dense or not a multiple of 128; the next call begins anew."""
    with installed(version) as calls:
        counting = KERNEL.with_max_logit()
        assert not counting.capabilities.varlen and KERNEL.capabilities.varlen
        largest = torch.full((4,), -torch.inf)
        for tokens in (128, 128, 40):
            q, k, v, _ = Case.draw(tokens, b=2, dtype=torch.bfloat16)
            out, lse = counting.forward(q, k, v, **CAUSAL)
            found = logits(q.float(), k.float(), np.tri(tokens) > 0, 0.25).amax((0, 2, 3))
            largest = torch.maximum(largest, found)
            plain = KERNEL.forward(q, k, v, **CAUSAL)
            assert torch.equal(plain[0], out) and torch.equal(plain[1], lse)
        assert counting.max_logit.dtype == torch.float32
        torch.testing.assert_close(counting.max_logit, largest, rtol=2**-8, atol=0)
        assert KERNEL.max_logit is None and KERNEL.with_max_logit().max_logit is None
        assert {call["return_max_logit"] for call in calls} == {True, False}


def test_largest_logits_name_the_cudnn_that_they_need():
    with installed("2.20.2"):
        library = te_library.installed()
        assert te_library.max_logit_fault(library._replace(cudnn=92100)) is None
        line = te_library.max_logit_fault(library._replace(cudnn=92000))
        assert line.endswith("with cuDNN 9.21.0 or later; 9.20.0 is installed")


@pytest.mark.parametrize(
    "cp, version, mask",
    [
        (2, "2.14", lambda n: Mask.causal(n)),
        (2, "2.14.1", lambda n: Mask.causal(n, window=(70, 0))),
        (4, "2.15", lambda n: Mask.causal(n)),
        (4, "2.20.2", lambda n: Mask.documents(np.array([0, 3, 100, 131, 132, 300, n]))),
    ],
)
def test_whole_ring(monkeypatch, cp, version, mask):
    n = 512
    plan = Plan.build(mask(n), Layout.zigzag(n, cp))
    case = Case.draw(n, b=2, h=4, g=2, d=16, e=24, dtype=torch.bfloat16)
    # Shards of a few tokens have the sizes that a real one has.
    monkeypatch.setattr(te_sizes, "_SMALLEST", 16)
    with installed(version) as calls:
        results = attend(case, plan, kernel="transformer_engine")
        packed = [call["cu_seqlens_q"] for call in calls if "thd" in call["qkv_layout"]]
    assert len(calls) >= 2 * cp, "every rank went through the adapter"
    if version == "2.20.2":
        assert {len(ends) - 1 for ends in packed} == {16}, "documents go together, with empty tiles"
    assert error_of(results, case, plan.mask) < 1.2e-2


def test_rejections_are_one_line():
    with installed("2.20.2"):
        assert (
            KERNEL.rejection(CPU, torch.float32, 64, 64)
            == "supports float16 and bfloat16, not torch.float32"
        )
        assert KERNEL.rejection(CPU, torch.float16, 264, 264).startswith(
            "has no fused backend for head sizes 264 and 264"
        )
        assert KERNEL.rejection(CPU, torch.float16, 200, 160) is None  # as (200, 200)
    assert (
        "transformer_engine': transformer_engine needs TransformerEngine, which is not installed"
        in refused(
            KernelError,
            choose,
            "transformer_engine",
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            d=64,
            e=64,
        )
    )


def test_a_graph_gets_the_generator_that_it_knows(monkeypatch):
    """A CUDA graph rejects a generator that was not registered with it; the results are the same
    bits.
    """
    q, k, v, _ = Case.draw(128, dtype=torch.bfloat16)
    with installed("2.20.2"):
        eager, _ = KERNEL.forward(q, k, v, **CAUSAL)
        monkeypatch.setattr(adapter, "capturing", lambda device: True)
        for _ in range(2):  # the second call is bound already
            before = torch.get_rng_state()
            out, _ = KERNEL.forward(q, k, v, **CAUSAL)
            assert not torch.equal(torch.get_rng_state(), before) and torch.equal(out, eager)


@pytest.mark.parametrize(
    "generation, version, cudnn, exact, limit, reason",
    [
        (9, "2.20.2", 91701, False, "", "needs cuDNN 9.18.0 or later on Hopper, where"),
        (9, "2.20.2", 91800, False, "", None),
        (9, "2.20.2", 92400, True, "0", "needs cuDNN 9.25.0 or later for deterministic"),
        (9, "2.17.1", 92500, True, "0", "needs TransformerEngine 2.18 or later for deterministic"),
        (9, "2.20.2", 92500, True, "", "needs CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=268435456 in"),
        (9, "2.20.2", 92500, True, "-1", "needs CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT="),
        (9, "2.18", 92500, True, "0", None),
        (8, "2.20.2", 92801, True, "0", "has deterministic gradients only on Hopper and later"),
        (8, "2.14", 92000, False, "", None),
        (8, "2.14", 90501, False, "", "needs cuDNN 9.6.0 or later"),
        (10, "2.14", 91701, True, "", None),
    ],
)
def test_versions(monkeypatch, generation, version, cudnn, exact, limit, reason):
    """NaN in gradients of packed tiles, and deterministic gradients that need hundreds of GiB, are
    wrong or missing.
    """
    monkeypatch.setattr(adapter, "compute_capability", lambda device: (generation, 0))
    monkeypatch.setenv(te_library.LIMIT, limit)
    with installed(version, cudnn=cudnn), determinism(exact):
        line = KERNEL.rejection(CPU, torch.bfloat16, 64, 64)
    if reason is None:
        assert line is None
    else:
        assert line.startswith(reason) and f"; {version} and cuDNN " in line


@pytest.mark.parametrize(
    "generation, cudnn, d, right",
    [
        (10, 92400, 256, False),
        (10, 92801, 256, True),
        (10, 92400, 192, True),
        (9, 92400, 256, True),
    ],
)
def test_large_packed_heads_on_blackwell(monkeypatch, generation, cudnn, d, right):
    """cuDNN 9.24 promises them and finds no plan."""
    monkeypatch.setattr(adapter, "compute_capability", lambda device: (generation, 0))
    with installed("2.20.2", cudnn=cudnn):
        line = KERNEL.varlen_rejection(torch.bfloat16, d, d) or ""
    needs = "needs cuDNN 9.28.0 or later for packed heads of 256 on Blackwell; 9.24.0 is installed"
    assert (line != needs) is right


def test_dense_gradients_that_may_be_nan(monkeypatch):
    """Without a backend for packed tiles, 192 keys are a dense call; flash attention takes its
    backward.
    """
    seen = []

    def backward(dout, q, k, v, out, lse, **options):
        seen.append(k.shape[1])
        return q, k, v

    monkeypatch.setattr(adapter.FLASH, "backward", backward)
    monkeypatch.setattr(KERNEL, "_wants_packing", lambda call: False)
    with installed("2.20.2") as calls:
        for size, hi, capability in (
            (192, OPEN, 9),
            (256, OPEN, 9),
            (160, OPEN, 9),
            (192, 0, 9),
            (192, OPEN, 10),
        ):
            monkeypatch.setattr(
                versions, "compute_capability", lambda device, major=capability: (major, 0)
            )
            q, k, v, dout = Case.draw(size, dtype=torch.bfloat16)
            band = CAUSAL | {"hi": hi}
            out, lse = KERNEL.forward(q, k, v, **band)
            KERNEL.backward(dout, q, k, v, out, lse, **band)
        assert seen == [192]
        assert [call["max_seqlen_kv"] for call in calls if "d_o" in call] == [256, 160, 192, 192]


def test_an_older_version_is_one_line():
    with installed("2.14"):
        sys.modules["transformer_engine"].__version__ = "2.13"
        te_library.installed.cache_clear()
        said = KERNEL.rejection(CPU, torch.bfloat16, 64, 64)
        assert said == "needs TransformerEngine 2.14 or later, 2.13 is installed"


def test_library_whose_parameters_do_not_fit_is_rejected(monkeypatch):
    def fused_attn_bwd(q, temperature):
        return q, temperature

    with installed("2.20.2"):
        monkeypatch.setattr(
            sys.modules["transformer_engine.pytorch.cpp_extensions.fused_attn"],
            "fused_attn_bwd",
            fused_attn_bwd,
        )
        te_library.installed.cache_clear()
        said = KERNEL.rejection(CPU, torch.bfloat16, 64, 64)
        assert (
            said == "fused_attn_bwd of the installed version needs temperature, which cp_ring does "
            "not know"
        )


def test_without_packed_tiles_documents_take_the_next_kernel(monkeypatch):
    """As on an A100. Packed calls of other plans, whose tiles are uneven, go to torch's flash
    attention.
    """
    plain = emulated_te.backend_for

    def backend(p):
        return emulated_te.NO_BACKEND if p.qkv_layout[1] == "thd_thd_thd" else plain(p)

    monkeypatch.setattr(emulated_te, "backend_for", backend)
    for name in ("forward_varlen", "backward_varlen"):
        monkeypatch.setattr(adapter.FLASH, name, getattr(REFERENCE, name))
    tensors = {"device": CPU, "dtype": torch.bfloat16, "d": 64, "e": 64}
    with installed("2.20.2"):
        assert choose("auto", **tensors) is KERNEL
        assert choose("auto", packed=True, **tensors).name == "cpu"
        assert "transformer_engine has no fused backend for packed tiles in " in refused(
            KernelError, choose, "transformer_engine", packed=True, **tensors
        )
        q, k, v = (torch.randn(9, 2, 64, dtype=torch.bfloat16) for _ in range(3))
        ends = torch.tensor([0, 4, 9], dtype=torch.int32)
        packing = Packing(ends, ends, 5, 5, -1, 0)
        out, lse = KERNEL.forward_varlen(q, k, v, packing, 0.1)
        dq, _, _ = KERNEL.backward_varlen(out, q, k, v, out, lse, packing, 0.1)
        assert out.shape == dq.shape == q.shape and torch.equal(
            out, REFERENCE.forward_varlen(q, k, v, packing, 0.1)[0]
        )
