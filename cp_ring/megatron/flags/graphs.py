"""CUDA graphs of Megatron: which of them hold attention, and which settings these support.

A graph repeats what the device did while it was captured, with new values in the same memory. So
the plan must be the same in every step, and nothing in attention may wait for the host, copy from
it, or count in Python. Messages over NCCL can be captured.
"""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.flags.layer_pattern import pattern_of

_SEPARATE = {"moe_router", "moe_preprocess", "mamba"}
"""Modules whose graphs hold them alone."""
_SHARED = {"mlp", "moe"}
"""Modules that --cuda-graph-impl local captures together with the attention of their layer."""
FULL = "full_iteration"


def implementation(args: Any) -> str:
    """What makes CUDA graphs under these flags, or with this configuration: `none`, `local`,
    `transformer_engine`, ...
    """
    if getattr(args, "enable_cuda_graph", False):
        return "local"
    if getattr(args, "external_cuda_graph", False):
        return "transformer_engine"
    return FULL if FULL in _modules(args) else getattr(args, "cuda_graph_impl", None) or "none"


def hold_attention(args: Any) -> bool:
    """Whether a CUDA graph holds attention: the graphs of whole layers, of a whole step, and of
    `attn`.

    Layers of a hybrid model are attention or something else, so a graph of something else is one
    without attention.
    """
    kind, modules = implementation(args), _modules(args)
    if kind == "none":
        return False
    separate = kind == "transformer_engine" or pattern_of(args)
    alone = _SEPARATE | (_SHARED if separate else set())
    return not modules or not modules <= alone


def flags_of(args: Any) -> str:
    """The flags that ask for graphs, as they were given."""
    old = [
        f"--{name}-cuda-graph"
        for name in ("enable", "external")
        if getattr(args, f"{name}_cuda_graph", False)
    ]
    shown = old[0] if old else f"--cuda-graph-impl {getattr(args, 'cuda_graph_impl', 'none')}"
    names = " ".join(sorted(_modules(args)))
    flag = "--cuda-graph-modules" if hasattr(args, "cuda_graph_modules") else "--cuda-graph-scope"
    return f"{shown} {flag} {names}" if names else shown


def _modules(args: Any) -> set[str]:
    """The modules in graphs by name, "" for all of a layer; Megatron up to 0.17 calls them the
    scope.
    """
    modules: set[str] = set()
    for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated"):
        values = getattr(args, name, None) or ()
        values = (
            values.split(",")
            if isinstance(values, str)
            else values
            if isinstance(values, list | tuple)
            else (values,)
        )
        modules |= {str(getattr(value, "name", value)) for value in values}
    return modules - {"full"}
