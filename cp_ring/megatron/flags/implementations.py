"""Which packages are installed that the parts of a job need; the models that a script builds."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path


def has_apex_norm(normalization: str) -> bool:
    """Whether local layers get Apex's norm; another package called apex does not count."""
    from megatron.core.fusions import fused_layer_norm

    return normalization == "LayerNorm" and (
        fused_layer_norm.HAVE_FUSED_LAYER_NORM or fused_layer_norm.HAVE_PERSIST_LAYER_NORM
    )


def has_transformer_engine() -> bool:
    """Whether a package called transformer_engine is installed, without importing it."""
    return (
        "transformer_engine" in sys.modules
        or importlib.util.find_spec("transformer_engine") is not None
    )


_LAYERS = {"M": ("mamba_ssm", "mamba-ssm"), "G": ("fla", "flash-linear-attention")}
_OTHER_MODELS = {"T5": "T5", "bert": "BERT", "retro": "Retro"}


def lacking(letters: str, spec: list[str] | None) -> str:
    """A distribution that Megatron's own layers of these letters need and that is not installed,
    or "". Layers of another --spec may need none.
    """
    if not letters or (spec and not spec[0].startswith("megatron.")):
        return ""
    if not has_transformer_engine():
        return "TransformerEngine"
    needed = (package for letter, package in _LAYERS.items() if letter in letters)
    return next((name for module, name in needed if not importlib.util.find_spec(module)), "")


def other_models(script: Path) -> str:
    """The kind of models, as `BERT`, that a script builds by what it imports of Megatron, where
    their attention is not causal self attention; else "".
    """
    try:
        nodes = list(ast.walk(ast.parse(script.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{name.name}" for name in node.names]
    start = "megatron.core.models."
    kinds = {name[len(start) :].partition(".")[0] for name in names if name.startswith(start)}
    return (
        ""
        if kinds - _OTHER_MODELS.keys()
        else " and ".join(_OTHER_MODELS[kind] for kind in sorted(kinds))
    )
