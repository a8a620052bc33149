"""`cp-ring doctor`: versions, GPUs, kernels and patches of this installation, a line each.

It needs the standard library alone: what a missing package hides is a line too. It imports the
packages that Megatron imports, because only an import shows that a package is broken.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator

from cp_ring.errors import ConfigError, one_line

Lines = Iterator[tuple[str, str]]
"""Names and texts of the report. A text that begins with `absent: ` means that something cannot be
used, without a fault; that of a `problem: ` says what to do.
"""


def main() -> int:
    """Print all findings. Return 1 if one of them is a problem."""
    # what packages print when they are imported would be in between
    with (
        open(os.devnull, "w") as nowhere,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        sections = {name: [*_lines(parts)] for name, parts in SECTIONS.items()}
    problems = 0
    for section, lines in sections.items():
        print(f"{section}:")
        for name, text in lines:
            print(f"  {name:<24}{text}")
            problems += text.startswith("problem: ")
    print(f"cp_ring: {problems or 'no'} problem(s)")
    return problems > 0


def _lines(parts: tuple[Callable[[], Lines], ...]) -> Lines:
    for part in parts:
        try:
            yield from part()
        except Exception as error:  # also what a broken package raises where it is imported
            yield part.__name__.strip("_"), f"problem: not examined: {_reason(error)}"


def _requirements() -> Lines:
    """Say for Python and each required package whether it is installed, in a supported version."""
    yield "python", platform.python_version()
    own = version_of("cp-ring")
    yield "cp-ring", own or "not installed: run from its source"
    texts = importlib.metadata.requires("cp-ring") or [] if own else []
    for text in sorted({text.partition(";")[0].strip() for text in texts if _needed(text)}):
        name, needed = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(.*)", text).groups()  # type: ignore[union-attr]
        version = version_of(name)
        if version is None:
            yield name, f"problem: not installed: pip install '{text}'"
        elif not _within(needed, version):
            yield name, f"problem: {version}: cp_ring needs {needed}: pip install '{text}'"


def _needed(text: str) -> bool:
    """Return True if jobs and commands need the package. Megatron has checks of its own."""
    extra = re.search(r"extra == ['\"](\w+)", text)
    wanted = extra is None or extra[1] in ("megatron", "tools")
    return wanted and not text.startswith("megatron-core")


def _within(needed: str, version: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # which is a finding of its own
        return True
    return SpecifierSet(needed).contains(version, prereleases=True)


def _megatron() -> Lines:
    from cp_ring.megatron import compat

    version = (compat.megatron_version() or "not installed").partition("+")[0]
    try:
        compat.check_version()
    except ConfigError as error:
        yield "megatron-core", f"problem: {version}: {error}"
        return
    yield "megatron-core", f"{version} ({compat.development() or f'in range {compat.SUPPORTED}'})"
    if compat.within("<0.19"):  # which does it wrong
        yield "full --moe-z-loss-coeff", "absent: needs megatron-core 0.19"


_BUILT = (
    ("torch", "torch", "torch"),
    ("TransformerEngine", "transformer_engine.pytorch", "transformer-engine"),
    ("flash-attn", "flash_attn", "flash-attn"),
    ("flash-attn 3", "flash_attn_interface", "flash-attn-3"),
    ("Apex", "apex.optimizers", "apex"),
    ("Triton", "triton", "triton"),
)


def _built_packages() -> Lines:
    """Say whether torch, and packages that Megatron or a kernel may use, can be imported."""
    from cp_ring.megatron import compat

    for name, module, package in _BUILT:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            yield name, "absent: not installed"
            continue
        version = version_of(package) or "unknown version"
        if name == "Apex" and compat.apex() == "other":
            yield name, f"problem: {version}: not NVIDIA's: pip uninstall apex"
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            advice = f"install the build for this CUDA and torch, or pip uninstall {package}"
            yield name, f"problem: {version}: {_reason(error)}: {advice}"
        else:
            yield name, version


def _machine() -> Lines:
    yield "Slurm", shutil.which("srun") or "absent: no srun on PATH"
    import torch

    built = torch.version.cuda or "this torch is a build for the CPU"
    yield "CUDA", built if torch.cuda.is_available() else f"absent: {built}: torch finds no GPU"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        about = f"{card.name}, {card.total_memory >> 30} GiB, sm_{card.major}{card.minor}"
        yield f"GPU {index}", about
    if torch.cuda.is_available():
        high = os.environ.get("TORCH_NCCL_HIGH_PRIORITY") == "1"
        advice = "absent: messages of your own groups wait for kernels; Megatron jobs have it"
        yield "TORCH_NCCL_HIGH_PRIORITY", "1" if high else advice


def _kernels() -> Lines:
    import torch

    from cp_ring.kernels import OF_CUDA, REGISTRY

    for name, home in REGISTRY.items():
        device, dtype = ("cuda", torch.bfloat16) if name in OF_CUDA else ("cpu", torch.float32)
        try:
            reason = importlib.import_module(home).KERNEL.rejection(
                torch.device(device), dtype, 128, 128
            )
        # a package that the kernel uses is broken; the finding on that package says what to do
        except Exception as error:
            reason = f"cannot be used: {_reason(error)}"
        if device == "cuda" and not torch.cuda.is_available():
            reason = "no CUDA here" + (f"; {reason}" if reason else "")
        yield name, f"absent: {reason}" if reason else f"usable on {device}"


def _patches() -> Lines:
    from cp_ring import patches

    for patch in patches.table():
        state = {"not applied": "fits this version"}.get(patch["state"], patch["state"])
        yield patch["name"], "absent: " * state.startswith("rejected") + state


SECTIONS = {
    "versions": (_requirements, _megatron, _built_packages),
    "machine": (_machine,),
    "kernels": (_kernels,),
    "patches": (_patches,),
}
"""The report: what finds the lines of each section."""


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)[:300]}"
