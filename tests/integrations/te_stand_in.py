"""What of TransformerEngine stands around its context parallelism, for tests without a GPU: the
modules, the choice of a backend, and the arguments with which its two backends call
`attn_forward_func_with_cp`. Its own context parallelism only says that it was called.
"""

import sys
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from inspect import Parameter, Signature
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

FIRST = """is_training q k v cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv
    cu_seqlens_q_padded cu_seqlens_kv_padded dropout_p cp_group cp_global_ranks cp_stream
    cp_comm_type"""
DEFAULTS = {
    "softmax_scale": None, "qkv_format": "bshd", "attn_mask_type": "causal",
    "attn_bias_type": "no_bias", "attn_bias": None, "deterministic": False,
    "use_fused_attention": False, "window_size": None, "fp8": False, "fp8_meta": None,
    "quantizers": None, "pad_between_seqs": False, "use_flash_attn_3": False,
    "softmax_type": "vanilla", "softmax_offset": None, "fp8_output": False, "layer_number": 1,
    "return_max_logit": False,
}  # fmt: skip
_LATEST = {"use_flash_attn_4": False, "load_balancing_strategy": SimpleNamespace(name="DUAL_CHUNK_SWAP")}  # fmt: skip
LATER = {"2.14.0": {}, "2.19.0": _LATEST, "2.20.2": {"softcap": 0.0, **_LATEST}}
PARAMS = {
    "qkv_type": torch.Tensor, "qkv_layout": "sbhd_sbhd_sbhd", "num_heads": 16, "num_gqa_groups": 16,
    "max_seqlen_q": 128, "max_seqlen_kv": 128, "attn_mask_type": "no_mask", "window_size": None,
    "core_attention_bias_type": "no_bias", "attention_dropout": 0.0, "context_parallel": False,
    "cp_comm_type": "p2p", "is_training": True, "fp8": False, "fp8_meta": None,
    "inference_params": None, "softmax_type": "vanilla", "return_max_logit": False,
    "cuda_graph": False,
}  # fmt: skip
LATER_PARAMS = {"2.20.2": {"softcap": 0.0, "cp_size_a2a": 1, "has_score_mod": False}}
PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"


class Left(Exception):
    """A call was left to TransformerEngine's own context parallelism."""


class Stock:
    """Its function, which has only the right signature."""

    def __init__(self, version, more=(), without=()):
        names = {**DEFAULTS, **LATER.get(version, {}), **dict.fromkeys(more)}
        given = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in FIRST.split()]
        given += [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=x)
            for name, x in names.items()
            if name not in without
        ]
        self.__signature__ = Signature(given)

    def __call__(self, *given, **named):
        self.__signature__.bind(*given, **named)
        raise Left


def get_attention_backend(params):
    """Its reasons that depend on context parallelism: of windows, sinks and numbers of heads; and
    what it has no backend for.
    """
    window, comm = params.window_size, params.cp_comm_type
    windowed = window is not None and (window[0] != -1 or window[1] not in (-1, 0))
    odd = params.num_heads % 2 or params.num_gqa_groups % 2
    never = params.inference_params is not None or getattr(params, "has_score_mod", False)
    fused = not (
        never
        or (params.softmax_type != "vanilla" and comm != "a2a")
        or (windowed and "p2p" in comm)
        or ("a2a" in comm and odd)
    )
    flash = params.softmax_type == "vanilla" and not (windowed and "p2p" in comm) and not never
    flash, fused = flash and BACKENDS.flash, fused and BACKENDS.fused
    kind = "F16_arbitrary_seqlen" if fused else None
    return flash and not fused, None, fused, kind, False, [flash, fused, False]


BACKENDS = SimpleNamespace(flash=True, fused=True)
"""Those that are installed."""


@contextmanager
def installed(version="2.20.2", **signature):
    """The package in `sys.modules`."""
    parts = PACKAGE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    names += [f"{PACKAGE}.{name}" for name in ("backends", "utils", "dot_product_attention")]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        above, _, last = name.rpartition(".")
        if above:
            setattr(modules[above], last, module)
    modules["transformer_engine"].__version__ = version
    modules[f"{PACKAGE}.backends"].attn_forward_func_with_cp = Stock(version, **signature)
    modules[f"{PACKAGE}.utils"].get_attention_backend = get_attention_backend
    modules[f"{PACKAGE}.dot_product_attention"]._attention_backends = {"attention_params": "kept"}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield modules[PACKAGE]


def forward(
    package, q, k, v, *, version="2.20.2", qkv_format="sbhd", attn_mask_type="causal",
    window_size=None, cu_seqlens=(None, None), cp_group, cp_global_ranks, cp_comm_type="p2p",
    softmax_offset=None, softmax_scale=None, layer_number=1, deterministic=False, dropout=0.0,
    **params,
):  # fmt: skip
    """`DotProductAttention.forward` from its choice of a backend on, and what the backend calls.

    q, k, v: in the format of `qkv_format`. cu_seqlens: those of the whole sequence, and the padded
    ones or None. softmax_offset: [h], a learned sink. Returns out in that format.
    """
    groups = cp_group if isinstance(cp_group, list) else [cp_group]
    cp = 1
    for each in groups:
        cp *= dist.get_world_size(each)
    heads, tokens = q.dim() - 2, int(qkv_format == "bshd")
    longest = [x.shape[tokens] * cp for x in (q, k)]
    softmax_type = "vanilla" if softmax_offset is None else "learnable"
    shared = {
        "attn_mask_type": attn_mask_type, "window_size": window_size, "softmax_type": softmax_type,
    }  # fmt: skip
    kind = make_dataclass(
        "AttentionParams",
        [
            (name, object, field(default=x))
            for name, x in (PARAMS | LATER_PARAMS.get(version, {})).items()
        ],
    )
    choice = package.utils.get_attention_backend(
        kind(
            qkv_layout="_".join([qkv_format] * 3), num_heads=q.shape[heads],
            num_gqa_groups=k.shape[heads], max_seqlen_q=longest[0], max_seqlen_kv=longest[1],
            context_parallel=cp > 1, cp_comm_type=cp_comm_type, attention_dropout=dropout,
            **shared, **params,
        )
    )  # fmt: skip
    flash, _, fused, backend, unfused, _ = choice
    assert not unfused, "it would attend to this rank's tokens alone"
    assert (backend == "F16_arbitrary_seqlen") >= fused
    if not flash and not fused:
        raise ValueError("No dot product attention backend is available")
    real, padded = cu_seqlens
    layout = qkv_format
    if flash and qkv_format == "sbhd":
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        layout = "bshd"
    if padded is None and (fused or qkv_format == "thd"):
        padded = real
    first = (
        True, q, k, v, real, real, *longest, padded, padded, dropout, cp_group, cp_global_ranks,
        None, cp_comm_type,
    )  # fmt: skip
    named = {
        "softmax_scale": softmax_scale, "qkv_format": layout, "attn_mask_type": attn_mask_type,
        "deterministic": deterministic, "window_size": window_size, "quantizers": None,
        "pad_between_seqs": padded is not real, "fp8_output": False,
    }  # fmt: skip
    if "softcap" in params:
        named["softcap"] = params["softcap"]
    if fused:
        named |= {
            "attn_bias_type": params.get("core_attention_bias_type", "no_bias"), "attn_bias": None,
            "use_fused_attention": True, "fp8": params.get("fp8", False), "fp8_meta": None,
            "softmax_type": softmax_type, "layer_number": layer_number,
            "return_max_logit": params.get("return_max_logit", False),
            "softmax_offset": (
                None if softmax_offset is None else softmax_offset.reshape(1, -1, 1, 1).float()
            ),
        }  # fmt: skip
    out = package.backends.attn_forward_func_with_cp(*first, **named)
    out = out.view(*out.shape[:-2], -1).unflatten(-1, out.shape[-2:])  # as the backends view it
    return out.transpose(0, 1) if layout != qkv_format else out
