"""Hides the differences between the versions of Megatron that cp_ring supports.

The first functions read the versions without importing Megatron. The others import Megatron inside
the function, because this module is loaded before the patches are applied, and some patches must
come before Megatron.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.compat import arguments
from cp_ring.megatron.wrapping import Function, replaced
from cp_ring.runtime import RUNTIME

SUPPORTED = ">=0.18.2,<0.21"
"""The supported versions of megatron-core, as a PEP 440 specifier."""


def check_version(core_alone: bool = False) -> str:
    """Return the installed megatron-core version; raise `ConfigError` if it is outside `SUPPORTED`.

    With `core_alone`, megatron.training of the same version need not be installed.
    """
    version = megatron_version()
    if version is None or not within(SUPPORTED):
        found = f"but {version} is installed" if version else "which is not installed"
        raise ConfigError(
            f"--cp-ring needs megatron-core{SUPPORTED}, {found}: pip install "
            f"'megatron-core[training]{SUPPORTED}'"
        )
    # a namespace package, whose parts can lie in two folders
    if not core_alone and not has_training_loop():
        raise ConfigError(
            f"megatron-core {version} is installed without its megatron.training: pip install "
            f"'megatron-core[training]=={version}', or put a checkout of Megatron-LM of this "
            "version first on PYTHONPATH"
        )
    return version


def development() -> str:
    """Return which state of a development version was tested; "" for a released version."""
    tested = "is a development version, tested at commit d98e8a6 of 2026-08-22"
    return f"megatron-core {megatron_version()} {tested}" if within(">=0.20.dev0") else ""


def has_training_loop() -> bool:
    """Return True if megatron.training lies beside megatron.core; one of another installation does
    not count.
    """
    return _home("megatron.training") == _home("megatron.core")


def megatron_version() -> str | None:
    """Return the version of the megatron.core that Python would import, such as a checkout on
    PYTHONPATH, without importing it; None if there is none.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "core" / "package_info.py"
        if path.is_file():
            return _read_version(str(path))
    return None


@RUNTIME.cache()
def _read_version(path: str) -> str:
    return str(runpy.run_path(path)["__version__"])


def _home(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # no package megatron at all
        return None
    return Path(spec.origin).parent.parent if spec and spec.origin else None


def apex() -> str:
    """Return which package called apex is installed, without importing it: `nvidia`, `other` (the
    one on PyPI), or "".
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ""
    folders = spec.submodule_search_locations or []
    nvidia = any(Path(folder, "multi_tensor_apply").is_dir() for folder in folders)
    return "nvidia" if nvidia else "other"


def has_transformer_engine() -> bool:
    """Return True if a package called transformer_engine is installed, without importing it."""
    return (
        "transformer_engine" in sys.modules
        or importlib.util.find_spec("transformer_engine") is not None
    )


def logits_without_te(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Clear the request for attention logits in `args` within the block, if TransformerEngine is
    missing. Megatron rejects the request then, but ring attention does not need TransformerEngine
    for it.
    """
    names = () if has_transformer_engine() else ("qk_clip", "log_max_attention_logit")
    return replaced(*((args, name, False) for name in names))


def functions_uncompiled() -> AbstractContextManager[None]:
    """Make `torch.compile` return functions unchanged: for the CPU, on which they run eagerly, and
    for processes that read Megatron's flags alone. Importing the compiler is a third of Megatron's
    import time.
    """
    import torch  # imported here because most early checks need no torch

    compile_with_torch = torch.compile

    def uncompiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(uncompiled, **options)
        return model if inspect.isfunction(model) else compile_with_torch(model, **options)

    return replaced((torch, "compile", uncompiled))


def within(versions: str, version: str | None = None) -> bool:
    """Return True if `version` (default: the installed Megatron's) matches the PEP 440 specifier
    `versions`.
    """
    return SpecifierSet(versions).contains(version or megatron_version() or "0", prereleases=True)


def unwrapped(model: Any) -> Any:
    """Return a model without its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def pretrain(
    datasets: Function,
    forward_step: Function,
    embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    """Call Megatron's training loop for the model of the command line.

    datasets: returns the training, validation and test data sets.
    forward_step: runs one microbatch.
    embedding_ranks: returns which ranks of a pipeline hold the word embedding.
    """
    import megatron.training as training
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments

    from cp_ring.megatron import gpt_model

    wanted: dict[str, Any] = {
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "get_embedding_ranks": embedding_ranks,
    }
    named = any(word.partition("=")[0] == "--tokenizer-type" for word in sys.argv)
    defaults = {} if named else {"tokenizer_type": "GPT2BPETokenizer"}  # as Megatron's script
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    described = []
    if hasattr(argument_utils, "gpt_config_from_args"):
        described = [gpt_model.described(args)]
    else:
        wanted["model_provider"] = gpt_model.build  # this version expects it from the script
    container = argument_utils.pretrain_cfg_container_from_args(args, *described)
    training.pretrain(container, datasets, **wanted)


def steps_done() -> int:
    """Return the number of steps that this process has trained."""
    now = arguments()
    return max(0, getattr(now, "curr_iteration", 0) - getattr(now, "iteration", 0))
