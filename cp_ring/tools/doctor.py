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
from typing import Literal, NamedTuple

from cp_ring.errors import ConfigError, one_line


class Finding(NamedTuple):
    """One line of the report. `absent` means that something cannot be used, without a fault; the
    text of a `problem` says what to do.
    """

    name: str
    state: Literal["good", "absent", "problem"]
    text: str


def main() -> int:
    """Prints all findings. Returns 1 if one is a problem."""
    # what packages print when they are imported would be in between
    with (
        open(os.devnull, "w") as nowhere,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        sections = {name: [*_findings(parts)] for name, parts in SECTIONS.items()}
    problems = 0
    for section, findings in sections.items():
        print(f"{section}:")
        for finding in findings:
            state = "" if finding.state == "good" else f"{finding.state}: "
            print(f"  {finding.name:<24}{state}{finding.text}")
            problems += finding.state == "problem"
    print(f"cp_ring: {problems or 'no'} problem(s)")
    return int(problems > 0)


def _findings(parts: tuple[Callable[[], Iterator[Finding]], ...]) -> Iterator[Finding]:
    for part in parts:
        try:
            yield from part()
        except ImportError as error:
            name = part.__name__.strip("_").replace("_", " ")
            yield Finding(name, "absent", f"not examined: {error}")


def _requirements() -> Iterator[Finding]:
    """Python and the required packages: installed or not, and in a supported version or not."""
    yield Finding("python", "good", platform.python_version())
    own = version_of("cp-ring")
    yield Finding("cp-ring", "good", own or "not installed: run from its source")
    texts = importlib.metadata.requires("cp-ring") or [] if own else []
    for text in sorted({text.partition(";")[0].strip() for text in texts if _needed(text)}):
        name, needed = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(.*)", text).groups()  # type: ignore[union-attr]
        version = version_of(name)
        if version is None:
            yield Finding(name, "problem", f"not installed: pip install '{text}'")
        elif not _within(needed, version):
            advice = f"{version}: cp_ring needs {needed}: pip install '{text}'"
            yield Finding(name, "problem", advice)
        elif name == "torch":
            yield Finding(name, "good", version)


def _needed(text: str) -> bool:
    """Whether jobs and commands need it. Megatron has checks of its own."""
    extra = re.search(r"extra == ['\"](\w+)", text)
    wanted = extra is None or extra[1] in ("megatron", "tools")
    return wanted and not text.startswith("megatron-core")


def _within(needed: str, version: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # which is a finding of its own
        return True
    return SpecifierSet(needed).contains(version, prereleases=True)


def _megatron() -> Iterator[Finding]:
    from cp_ring.megatron import compat

    version = (compat.megatron_version() or "not installed").partition("+")[0]
    try:
        compat.check_version()
    except ConfigError as error:
        yield Finding("megatron-core", "problem", f"{version}: {error}")
        return
    state = compat.development() or f"in range {compat.SUPPORTED}"
    yield Finding("megatron-core", "good", f"{version} ({state})")


def _cuda() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("CUDA", "good", f"{torch.version.cuda}, NCCL {nccl}")
    elif torch.version.cuda is None:
        yield Finding("CUDA", "absent", "this torch is a build for the CPU")
    else:
        yield Finding("CUDA", "absent", f"{torch.version.cuda}: torch finds no GPU")


_OPTIONAL = (
    ("TransformerEngine", "transformer_engine.pytorch", "transformer-engine"),
    ("flash-attn", "flash_attn", "flash-attn"),
    ("flash-attn 3", "flash_attn_interface", "flash-attn-3"),
    ("Apex", "apex.optimizers", "apex"),
    ("Triton", "triton", "triton"),
)


def _optional_packages() -> Iterator[Finding]:
    """Whether packages that Megatron or a kernel may use can be imported."""
    from cp_ring.megatron import compat

    for name, module, package in _OPTIONAL:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            yield Finding(name, "absent", "not installed")
            continue
        version = version_of(package) or "unknown version"
        if name == "Apex" and compat.apex() == "other":
            advice = "not NVIDIA's, but a package of the same name: pip uninstall apex"
            yield Finding(name, "problem", f"{version}: {advice}")
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            advice = f"install the build for this torch and CUDA, or pip uninstall {package}"
            yield Finding(name, "problem", f"{version}: {_reason(error)}: {advice}")
        else:
            yield Finding(name, "good", version)


def _machine() -> Iterator[Finding]:
    if srun := shutil.which("srun"):
        yield Finding("Slurm", "good", srun)
    else:
        yield Finding("Slurm", "absent", "no srun on PATH")
    import torch

    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        about = f"{card.name}, {card.total_memory >> 30} GiB, sm_{card.major}{card.minor}"
        yield Finding(f"GPU {index}", "good", about)


def _kernels() -> Iterator[Finding]:
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
        yield Finding(name, "absent" if reason else "good", reason or f"usable on {device}")


def _patches() -> Iterator[Finding]:
    from cp_ring import patches

    for patch in patches.table():
        rejected = patch["state"].startswith("rejected")
        state = {"not applied": "fits this version"}.get(patch["state"], patch["state"])
        yield Finding(patch["name"], "absent" if rejected else "good", state)


def _known_errors() -> Iterator[Finding]:
    """What the installed Megatron does not have, or does wrong."""
    from cp_ring.megatron import compat

    for what, advice in compat.missing_features():
        yield Finding(what, "absent", f"not with this megatron-core: {advice}")


SECTIONS = {
    "versions": (_requirements, _megatron, _optional_packages, _cuda),
    "machine": (_machine,),
    "kernels": (_kernels,),
    "patches": (_patches,),
    "known errors": (_known_errors,),
}
"""The report: what finds the lines of each section."""


def version_of(distribution: str) -> str | None:
    """The installed version."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reason(error: BaseException) -> str:
    text = one_line(error)[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
