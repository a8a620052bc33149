"""Which packages the parts of a job come from: norms, optimizer and gradient accumulation in this
environment; what layers need; the models that a script builds.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from pathlib import Path

_PACKAGES = {
    "transformer_engine": "TransformerEngine",
    "apex": "Apex",
    "torch": "torch",
    "megatron": "Megatron",
}


def line(args: argparse.Namespace) -> str:
    """The implementations that a job with these completed `args` uses, as one readable line."""
    return (
        f"norm {norm(args)}, optimizer {optimizer(args)}, gradient accumulation "
        f"{gradient_accumulation(args)}"
    )


def norm(args: argparse.Namespace) -> str:
    """The layers' norm, as `torch RMSNorm`: TransformerEngine's, Apex's, or torch's."""
    if args.spec is not None:
        return f"of {' '.join(args.spec)}"
    if args.transformer_impl == "local":
        return f"{'Apex' if has_apex_norm(args.normalization) else 'torch'} {args.normalization}"
    return f"TransformerEngine {args.normalization}"


def optimizer(args: argparse.Namespace) -> str:
    """The optimizer, as `Apex FusedAdam`: Megatron uses TransformerEngine's, else Apex's, else
    torch's.
    """
    # not at the top: Megatron would be loaded before the patches
    import megatron.core.optimizer as module

    on_cpu = "CPU" if getattr(args, "optimizer_cpu_offload", False) else ""
    kind = getattr(module, on_cpu + {"adam": "Adam", "sgd": "SGD"}.get(args.optimizer, ""), None)
    if kind is None:
        return str(args.optimizer)
    name = f"{_PACKAGES.get(kind.__module__.partition('.')[0], kind.__module__)} {kind.__name__}"
    return f"{name} on the CPU" if on_cpu else name


def gradient_accumulation(args: argparse.Namespace) -> str:
    """Whose matrix multiplication adds weight gradients to float32 sums by itself, or `unfused`."""
    if not args.gradient_accumulation_fusion:
        return "unfused"
    return f"fused by {'Apex' if args.transformer_impl == 'local' else 'TransformerEngine'}"


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
