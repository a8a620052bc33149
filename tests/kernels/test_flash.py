"""The flash-attn adapter on the functions of every listed version, which a stand-in computes in
float64 from their arguments.

Where a version registers its functions as `torch.library.custom_op`, the stand-in does too, with
the version's schemas.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels import REGISTRY, flash
from cp_ring.kernels.base import Packing, determinism, deterministic
from cp_ring.kernels.flash import FlashKernel, Functions
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.testing.oracle import Case
from tests import conformance
from tests.rings import attend, error_of

CUSTOM_OPS = {  # label: outputs of forward
    "3: flash-attn August 2026": 4,
}
SIGNATURES = json.loads((Path(__file__).parent / "flash_attn_signatures.json").read_text())
UNPACKED = "3: flash-attn 2.7.0"  # its packed tiles have a function of their own
CPU = torch.device("cpu")
KIND = CPU, torch.float16, 64, 64


def stand_in(label):
    """The adapter on functions with a version's exact parameters."""
    found = functions_of(label)
    names = next(names for version, _, names in flash._HOMES if version == label[0])
    functions = Functions(label[0], *(found[name] for name in names))
    return type("StandIn", (FlashKernel,), {"devices": ("cpu",), "functions": functions})()


@cache
def functions_of(label):
    found = {}
    for name, signature in SIGNATURES[label].items():
        back = "bwd" in name or "backward" in name
        scope = {
            "run": backward if back else forward,
            "label": label,
            "Optional": Optional,
            "Tensor": torch.Tensor,
        }
        several = tuple[(torch.Tensor,) * CUSTOM_OPS.get(label, 1)]
        scope["returns"] = torch.Tensor if back else several
        wants = ", ".join(map(annotated, signature.split()))
        source = f"def {name}({wants}) -> returns: return run(label, dict(locals()))"
        exec(compile(source, name, "exec", dont_inherit=True), scope)
        found[name] = scope[name]
        if label in CUSTOM_OPS:
            home = "cp_ring_test_" + re.sub(r"\W+", "_", label)
            mutated = ("dq", "dk", "dv") if back else ()
            found[name] = torch.library.custom_op(
                f"{home}::{name}", scope[name], mutates_args=mutated
            )
    return found


KINDS = {
    "int": "window_size_left window_size_right attention_chunk num_splits sm_margin",
    "float": "dropout_p softcap",
    "bool": "causal is_causal return_softmax deterministic rotary_interleaved zero_tensors",
    "Optional[bool]": "pack_gqa",
    "Tensor": "q k v dout out softmax_lse",
}
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}


def annotated(word):
    """A parameter with the type that flash-attn's source gives it."""
    name, _, default = word.partition("=")
    numbers = {"softmax_scale": "float", "max_seqlen_q": "int", "max_seqlen_k": "int"}
    kind = TYPES.get(name) or f"Optional[{numbers.get(name, 'Tensor')}]"
    return f"{name}: {kind}" + (f" = {default}" if default else "")


def packing_of(label, a):
    """The call as packed tiles, as the version's documentation says what its window means."""
    dense = a.get("cu_seqlens_q") is None
    q, k = a["q"], a["k"]
    assert q.dtype in (torch.float16, torch.bfloat16)
    d, e = q.shape[-1], a["v"].shape[-1]
    assert d % 8 == e % 8 == 0 and (d == e or label[0] == "4")
    left, right = (
        a["window_size"] if "window_size" in a else (a["window_size_left"], a["window_size_right"])
    )
    if label[0] == "4":
        assert all(x is None or x >= 0 for x in (left, right)), (
            "negative bounds mean something else there"
        )
    left, right = (-1 if x is None else x for x in (left, right))
    if a.get("causal") or a.get("is_causal"):
        right = 0
    if dense:
        b, s, u = q.shape[0], q.shape[1], k.shape[1]
        ends = (torch.arange(0, (b + 1) * size, size, dtype=torch.int32) for size in (s, u))
        return Packing(*ends, s, u, left, right), True
    assert a["cu_seqlens_q"].dtype == a["cu_seqlens_k"].dtype == torch.int32
    return Packing(
        a["cu_seqlens_q"], a["cu_seqlens_k"], a["max_seqlen_q"], a["max_seqlen_k"], left, right
    ), False


def forward(label, a):
    packing, dense = packing_of(label, a)
    flat = [a[x].flatten(0, 1) if dense else a[x] for x in "qkv"]
    out, lse = REFERENCE.forward_varlen(*flat, packing, a["softmax_scale"])
    out, lse = out.to(a["q"].dtype), lse.float()
    if label[0] == "4":
        assert a["return_lse"]
    if dense:
        out = out.unflatten(0, a["q"].shape[:2])
        lse = lse.unflatten(1, a["q"].shape[:2]).transpose(0, 1).contiguous()
    if label in CUSTOM_OPS:
        return out, lse, *(torch.empty(0) for _ in range(CUSTOM_OPS[label] - 2))
    return out, lse, None, None


def backward(label, a):
    packing, dense = packing_of(label, a)
    dout, q, k, v, out = (
        a[x].flatten(0, 1) if dense else a[x] for x in ("dout", "q", "k", "v", "out")
    )
    lse = a["softmax_lse"] if "softmax_lse" in a else a["lse"]
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == (
        (a["q"].shape[0], a["q"].shape[2], a["q"].shape[1]) if dense else (q.shape[1], len(q))
    )
    lse = lse.transpose(0, 1).flatten(1, 2) if dense else lse
    grads = REFERENCE.backward_varlen(dout, q, k, v, out, lse, packing, a["softmax_scale"])
    assert a["deterministic"] is deterministic()
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        a[name].copy_(x.reshape(a[name].shape))
    return torch.empty(0)


@pytest.mark.parametrize("label", [x for x in SIGNATURES if x != UNPACKED])
def test_conformance(label):
    kernel = stand_in(label)
    for prop in (
        "full rectangles",
        "bands",
        "merged backward",
        "varlen",
        "deterministic",
    ):
        conformance.check(kernel, CPU, torch.float16, only=prop, heads=[(4, 2, 16, 24)])


def test_no_deterministic_backward_no_determinism():
    """A version without the parameter is rejected where the same bits are wanted, and not
    otherwise.
    """
    kernel = stand_in("3: flash-attn August 2026")
    with determinism(True):
        assert kernel.rejection(*KIND) is None
    bare = kernel.functions

    def inexact(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        window_size,
        cu_seqlens_q,
    ):
        raise AssertionError("not called")

    kernel.__class__.functions = replace(bare, backward=inexact)
    assert kernel.rejection(*KIND) is None
    with determinism(True):
        assert "no deterministic backward" in kernel.rejection(*KIND)


def test_whole_ring(monkeypatch):
    kernel = stand_in("3: flash-attn August 2026")
    monkeypatch.setitem(sys.modules, "tests_flash_stand_in", SimpleNamespace(KERNEL=kernel))
    monkeypatch.setitem(REGISTRY, "flash", "tests_flash_stand_in")
    case = Case.draw(96, b=2, h=4, g=2, d=16, e=12, dtype=torch.bfloat16)
    for mask in (Mask.causal(96, (20, 0)), Mask.documents([0, 7, 50, 51, 96])):
        plan = Plan.build(mask, Layout.zigzag(96, 3))
        assert error_of(attend(case, plan, kernel="flash"), case, mask) < 1.2e-2


def test_rejections_are_one_line():
    kernel = stand_in("4: flash-attn August 2026")
    assert kernel.rejection(CPU, torch.bfloat16, 192, 128) is None
    assert (
        kernel.rejection(CPU, torch.bfloat16, 256, 256)
        == "4 supports head sizes up to 128, not 256 and 256"
    )
    assert (
        kernel.rejection(CPU, torch.float32, 64, 64)
        == "supports float16 and bfloat16, not torch.float32"
    )


@pytest.fixture
def homes(monkeypatch):
    """Sets what importing each home of flash-attn gives: a module, or an exception."""
    found = {}

    def load(name):
        result = found.get(
            name, ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        )
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(flash.importlib, "import_module", load)
    return found


def reason_of():
    flash._installed.cache_clear()
    return FlashKernel().rejection(torch.device("cuda"), torch.bfloat16, 64, 64)


def library(home):
    """All functions of a home, with the parameters of a listed version."""
    version, names = next((v, names) for v, where, names in flash._HOMES if where == home)
    functions = functions_of(next(label for label in SIGNATURES if label[0] == version))
    return SimpleNamespace(**{name: functions[name] for name in names})


def test_why_an_installed_flash_attn_cannot_be_used(homes):
    missing = "needs flash-attn 3 or 4, which is not installed"
    assert reason_of() == missing
    # where version 2 is installed, the package is there, and the module of version 4 is not
    homes["flash_attn.cute.interface"] = ModuleNotFoundError("no", name="flash_attn.cute")
    assert reason_of() == missing
    homes["flash_attn_interface"] = ImportError("libcudart.so.12: cannot open shared object file")
    assert (
        reason_of() == "cannot load flash-attn 3: libcudart.so.12: cannot open shared object file"
    )
    homes["flash_attn_interface"] = ModuleNotFoundError("No module named 'einops'", name="einops")
    assert reason_of() == "cannot load flash-attn 3: it needs einops, which is not installed"
    homes["flash_attn_interface"] = ModuleNotFoundError("no", name="flash_attn_3_cuda")
    assert "flash_attn_3_cuda" in reason_of()


def test_a_version_3_without_packed_tiles_is_rejected(homes):
    homes["flash_attn_interface"] = SimpleNamespace(**functions_of(UNPACKED))
    assert reason_of() == "_flash_attn_forward of the installed version has no cu_seqlens_q"


def test_version_4_is_taken_only_where_it_has_a_backward(homes, monkeypatch):
    homes["flash_attn.cute.interface"] = library("flash_attn.cute.interface")
    generation = [8]
    monkeypatch.setattr(flash, "compute_capability", lambda device: (generation[0], 0))
    assert reason_of() == "4 has no backward for GPUs of compute capability 8"
    homes["flash_attn_interface"] = library("flash_attn_interface")
    assert reason_of() is None and FlashKernel().functions.version == "3"
    for generation[0] in (9, 10, 12):
        assert reason_of() is None and FlashKernel().functions.version == "4"
    with determinism(True):
        assert (
            reason_of()
            == "flash-attn 4 has no deterministic backward for GPUs of compute capability 12"
        )
        generation[0] = 9
        assert "compute capability" not in (reason_of() or "")
    generation[0] = 13
    assert "4 has no backward for GPUs of compute capability 13" in reason_of()
