"""TransformerEngine as its callers see it, on the CPU: any version's signatures, computing only
from the arguments.
"""

import dataclasses
import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import cp_ring.kernels.transformer_engine as adapter
from cp_ring import kernels
from cp_ring.kernels import REGISTRY, deterministic, te_library
from cp_ring.kernels.base import Packing
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.testing.oracle import logits

SIGNATURES = json.loads((Path(__file__).parent / "transformer_engine_signatures.json").read_text())
NO_BACKEND, F16 = 0, 1
calls = []
"""Arguments of every call since `installed`, the newest last."""


class CpuKernel(adapter.TransformerEngineKernel):
    devices = ("cuda", "cpu")


KERNEL = CpuKernel()


class Names:
    """Stands for an enum that is looked up by name."""

    def __init__(self, kind):
        self.kind = kind

    def __getitem__(self, name):
        return self.kind, name


@contextmanager
def installed(version, cudnn=92600):
    """TransformerEngine `version` is importable, with version `cudnn` of cuDNN."""
    calls.clear()
    fused = ModuleType("transformer_engine.pytorch.cpp_extensions.fused_attn")
    for name, implementation in (("fused_attn_fwd", forward), ("fused_attn_bwd", backward)):
        scope = {"run": implementation}
        source = (
            f"def {name}({', '.join(SIGNATURES[version][name].split())}): return "
            "run(dict(locals()))"
        )
        exec(source, scope)
        setattr(fused, name, scope[name])
    fused.QKVLayout, fused.AttnBiasType = Names("layout"), Names("bias")
    fused.AttnMaskType, fused.SoftmaxType = Names("mask"), Names("softmax")
    fused.QKVFormat = Names("format")
    fused.FusedAttnBackend = {"No_Backend": NO_BACKEND, "F16_arbitrary_seqlen": F16}
    constants = ModuleType("transformer_engine.pytorch.constants")
    constants.TE_DType = {dtype: ("dtype", dtype) for dtype in (torch.float16, torch.bfloat16)}
    extension = ModuleType("transformer_engine_torch")
    extension.get_fused_attn_backend = backend
    extension.get_cudnn_version = lambda: cudnn
    utils = ModuleType("transformer_engine.pytorch.attention.dot_product_attention.utils")
    if "FusedAttentionParams" in SIGNATURES[version]:
        # All fields have defaults in the real one; those that stay away here are not looked at for
        # this kind of call.
        fields = SIGNATURES[version]["FusedAttentionParams"].split()
        utils.FusedAttentionParams = dataclasses.make_dataclass(
            "FusedAttentionParams", [(name, object, None) for name in fields]
        )
        extension.get_fused_attn_backend = lambda params: (backend_of(params), "")
    modules = {module.__name__: module for module in (fused, constants, extension, utils)}
    for module in (fused, utils):
        parent = module.__name__
        while parent := parent.rpartition(".")[0]:
            modules.setdefault(parent, ModuleType(parent))
    modules["transformer_engine"].__version__ = version if version[0].isdigit() else "2.19"
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setitem(REGISTRY, "transformer_engine", __name__)
        patch.setattr(kernels, "OF_CUDA", frozenset())  # this one takes tensors of the CPU
        te_library.installed.cache_clear()
        KERNEL.__init__()
        yield calls
    te_library.installed.cache_clear()


BY_POSITION = """is_training q_type kv_type qkv_layout bias_type attn_mask_type softmax_type dropout
    num_attn_heads num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v window_size_left
    window_size_right return_max_logit cuda_graph deterministic"""


def backend(*x):
    """Arguments by position, before 2.20."""
    p = SimpleNamespace(**dict(zip(BY_POSITION.split(), x, strict=True)))
    assert p.q_type == p.kv_type
    assert isinstance(p.return_max_logit, bool) and p.cuda_graph is False
    return backend_for(p)


def backend_of(p):
    """One object with named fields, since 2.20."""
    packed = p.qkv_layout == ("layout", "thd_thd_thd")
    kind = "thd" if packed else "sbhd"
    assert p.dqkv_layout == p.qkv_layout == ("layout", "_".join([kind] * 3))
    assert p.o_format == p.do_format == ("format", kind)
    assert p.qkv_dtype == p.o_dtype == p.do_dtype == p.dqkv_dtype
    assert p.bottom_right_diagonal is False
    assert p.attn_scale > 0
    assert p.batch_size >= 1
    assert (p.num_tokens_q > 0) == (p.num_tokens_kv > 0) == packed
    return backend_for(p)


def backend_for(p):
    """That of the attention which all versions name alike."""
    assert p.is_training is True
    assert p.deterministic == deterministic()
    kinds = p.bias_type, p.softmax_type, p.dropout
    assert kinds == (("bias", "no_bias"), ("softmax", "vanilla"), 0.0)
    kind, mask = p.qkv_layout[1].split("_")[0], p.attn_mask_type[1]
    assert mask in {"sbhd": ("no_mask", "causal"), "thd": ("padding", "padding_causal")}[kind]
    window = p.window_size_left, p.window_size_right
    assert window == (-1, 0 if "causal" in mask else -1)
    assert p.num_attn_heads % p.num_gqa_groups == 0
    assert min(p.max_seqlen_q, p.max_seqlen_kv) >= 1
    d, e = p.head_dim_qk, p.head_dim_v
    good = (
        d % 8 == 0
        and e % 8 == 0
        and max(d, e) <= 256
        and not (d != e and min(d, e) >= 128 and (d, e) != (192, 128))
    )
    return F16 if good else NO_BACKEND


def forward(a):
    calls.append(a)
    check(a)
    # without a generator, the default one advances, though dropout is 0
    torch.rand((), generator=a["rng_gen"])
    assert a["is_training"] is True
    out, lse = REFERENCE.forward_varlen(*(flat(a, a[x]) for x in "qkv"), packing_of(a), scale_of(a))
    out, stats = shaped(a, out, a["q"]).to(a["fake_dtype"]), stats_of(a, lse.float())
    aux = [stats, torch.tensor([17, 4], dtype=torch.int64)]
    if a["return_max_logit"]:
        return out, aux, largest(a).to(a["fake_dtype"])
    return out, aux


def backward(a):
    calls.append(a)
    check(a)
    assert a.get("dqkv_dtype", ("dtype", a["fake_dtype"])) == ("dtype", a["fake_dtype"])
    stats, rng_state = a["aux_ctx_tensors"]
    assert (rng_state.dtype, rng_state.shape, stats.dtype) == (torch.int64, (2,), torch.float32)
    assert stats.is_contiguous() and a["d_o"].is_contiguous()
    assert a["o"].shape == a["d_o"].shape == (*a["q"].shape[:-1], a["v"].shape[-1])
    dout, *tensors = (flat(a, a[x]) for x in ("d_o", "q", "k", "v", "o"))
    lse = stats[..., 0].T if packed(a) else stats[..., 0].transpose(0, 1).flatten(1)
    grads = REFERENCE.backward_varlen(dout, *tensors, lse, packing_of(a), scale_of(a))
    found = [shaped(a, x, a[n]).to(a["fake_dtype"]) for n, x in zip("qkv", grads, strict=True)]
    return [*found, None, None]


def check(a):
    """What the library would reject or, worse, misread."""
    layout = a["qkv_layout"].split("_")
    assert layout in (["sbhd"] * 3, ["thd"] * 3), "the default layout is sbh3d"
    for name in ("o_format", "do_format"):
        assert a.get(name, layout[0]) == layout[0]
    assert a.get("dqkv_layout", a["qkv_layout"]) == a["qkv_layout"]
    assert a["fused_attention_backend"] == F16
    assert a["attn_bias_type"] == "no_bias"
    assert a["softmax_type"] == "vanilla"
    assert a["dropout"] == 0.0
    assert not a.get("bottom_right_diagonal")
    for x in (a["q"], a["k"], a["v"]):
        assert x.is_contiguous(), "strides are made from the layout"
        assert x.dtype == a["fake_dtype"] in (torch.float16, torch.bfloat16)
        assert x.shape[-1] % 8 == 0
    for side, x in (("q", a["q"]), ("kv", a["k"])):
        cu, longest = a[f"cu_seqlens_{side}"], a[f"max_seqlen_{side}"]
        assert cu.dtype == torch.int32
        assert isinstance(longest, int)
        if layout[0] == "thd":
            assert torch.equal(a[f"cu_seqlens_{side}_padded"], cu)
            assert int(cu[-1]) <= len(x), "results of tokens behind the last tile are not read"
            assert int(cu.diff().max()) <= longest
        else:
            assert cu.tolist() == [i * len(x) for i in range(x.shape[1] + 1)]
            assert longest == len(x)


def packed(a):
    return a["qkv_layout"] == "thd_thd_thd"


def flat(a, x):
    """[t, heads, size], of all sequences; without the tokens behind the last one."""
    if not packed(a):
        return x.transpose(0, 1).flatten(0, 1)
    side = "q" if len(x) == len(a["q"]) else "kv"
    return x[: int(a[f"cu_seqlens_{side}"][-1])]


def shaped(a, x, like):
    """As the library returns it: NaN in the tokens behind the last sequence."""
    if not packed(a):
        return x.unflatten(0, like.shape[1::-1]).transpose(0, 1).contiguous()
    behind = torch.full((len(like) - len(x), *x.shape[1:]), math.nan, dtype=x.dtype)
    return torch.cat([x, behind])


def stats_of(a, lse):
    """lse [h, t] as [b, h, s, 1], or for thd as [t, h, 1]."""
    if packed(a):
        return shaped(a, lse.T, a["q"])[..., None].contiguous()
    return lse.unflatten(1, a["q"].shape[1::-1]).transpose(0, 1).contiguous()[..., None]


def packing_of(a):
    causal = a["attn_mask_type"] in ("causal", "padding_causal")
    assert causal or a["attn_mask_type"] in ("no_mask", "padding")
    assert tuple(a["window_size"]) == ((-1, 0) if causal else (-1, -1))
    ends = a["cu_seqlens_q"], a["cu_seqlens_kv"]
    # causal is aligned top left there, bottom right in a packing
    more = int((ends[0].diff() - ends[1].diff()).max())
    assert not causal or more == 0 or (more > 0 and not packed(a)), "packed ones are squares"
    return Packing(*ends, a["max_seqlen_q"], a["max_seqlen_kv"], -1, more if causal else -1)


def scale_of(a):
    return a["attn_scale"] if a["attn_scale"] is not None else a["q"].shape[-1] ** -0.5


def largest(a):
    """The largest logit of each head."""
    q, k = (a[x].float() for x in "qk")
    if packed(a):
        sizes = [a[f"cu_seqlens_{side}"].diff().tolist() for side in ("q", "kv")]
        pairs = zip(
            *(x[: sum(n)].split(n) for x, n in zip((q, k), sizes, strict=True)), strict=True
        )
    else:
        pairs = zip(q.unbind(1), k.unbind(1), strict=True)
    causal, found = "causal" in a["attn_mask_type"], []
    for q, k in pairs:
        if len(q):
            allowed = np.tri(len(q), len(k), 0 if causal else len(k)) > 0
            found.append(logits(q[None], k[None], allowed, scale_of(a)).amax((0, 2, 3)))
    return torch.stack(found).amax(0)
