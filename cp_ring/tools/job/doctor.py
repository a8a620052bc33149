"""Examines this installation: versions, kernels, devices and patches. Each finding is one line of
the report.

It needs the standard library alone. What a missing package hides is a finding too.
The examination trains nothing and makes no process group. It imports the packages that Megatron
imports, because only an import shows that a package is broken. Any error of such an import is a
finding.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cp_ring.errors import ConfigError, one_line

State = Literal["good", "absent", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: versions, machine, kernels, patches or limits.
        name: what was examined.
        state: `good`, `problem`, or `absent`, which means that something cannot be used, without a
        fault.
        found: the version or the state that was found.
        advice: what to do, or the consequence; never empty for a problem.
    """

    section: str
    name: str
    state: State
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _requirements,
        _megatron,
        _torch_libraries,
        _transformer_engine,
        _flash_attention,
        _apex,
        _others,
        _devices,
        _kernels,
        _patches,
    )
    found = [finding for part in parts for finding in _findings_of(part)]
    return found + _findings_of(partial(_limits, found))


def _findings_of(part: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return [*part()]
    except ImportError as error:
        return [Finding("limits", "doctor", "absent", f"not examined: {error}")]


def main() -> int:
    """`cp-ring doctor` without the packages of its command: all findings as lines."""
    found = examine()
    for one in found:
        print(f"{one.section}: {one.name}: {one.state}", one.found, one.advice, sep="  ")
    for line in (wrong := problems(found)):
        print(f"cp_ring: problem: {line}", file=sys.stderr)
    return int(bool(wrong))


def _python() -> Iterator[Finding]:
    yield Finding("versions", "python", "good", platform.python_version())


def _requirements() -> Iterator[Finding]:
    """The required packages: installed or not, and in a supported version or not."""
    yield Finding(
        "versions", "cp-ring", "good", version_of("cp-ring") or "not installed: run from its source"
    )
    texts = importlib.metadata.requires("cp-ring") or [] if version_of("cp-ring") else []
    for text in sorted({text.partition(";")[0].strip() for text in filter(_concerns_jobs, texts)}):
        name, needed = _REQUIREMENT.match(text).groups()  # type: ignore[union-attr]
        version = version_of(name)
        if version is None:
            yield Finding("versions", name, "problem", "not installed", f"pip install '{text}'")
        elif not _within(needed, version):
            advice = f"cp_ring needs {needed}: pip install '{text}'"
            yield Finding("versions", name, "problem", version, advice)
        elif name == "torch":
            yield Finding("versions", name, "good", version)


def _within(needed: str, version: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # which is a finding of its own
        return True
    return SpecifierSet(needed).contains(version, prereleases=True)


_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?\s*(.*)")


def _concerns_jobs(text: str) -> bool:
    """Whether jobs and commands need it. Megatron has checks of its own."""
    extra = re.search(r"extra == ['\"](\w+)", text)
    return not text.startswith("megatron-core") and (
        extra is None or extra[1] in ("megatron", "tools")
    )


def _megatron() -> Iterator[Finding]:
    from cp_ring.megatron import compat

    version = (compat.megatron_version() or "not installed").partition("+")[0]
    try:
        compat.check_version()
    except ConfigError as error:
        yield Finding("versions", "megatron-core", "problem", version, str(error))
        return
    state = compat.development() or f"in range {compat.SUPPORTED}"
    yield Finding("versions", "megatron-core", "good", f"{version} ({state})")


def _torch_libraries() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding(
            "versions", "CUDA", "absent", "this torch is a build for the CPU", "GPUs cannot be used"
        )
        return
    here: State = "good" if torch.cuda.is_available() else "absent"
    unused = "" if here == "good" else "not used: there is no GPU"
    yield Finding("versions", "CUDA", here, torch.version.cuda, unused)
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    found = (
        ".".join(map(str, torch.cuda.nccl.version())) if nccl else "this torch is built without it"
    )
    yield Finding(
        "versions",
        "NCCL",
        here if nccl else "absent",
        found,
        unused if nccl else "GPUs cannot be used",
    )
    try:
        cudnn = torch.backends.cudnn.version()
    except Exception as error:
        advice = (
            "torch cannot load it: let only the nvidia-cudnn package that torch asks for be on "
            "LD_LIBRARY_PATH"
        )
        yield Finding("versions", "cuDNN", "problem", _in_one_line(error), advice)
        return
    shown = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "not there"
    yield Finding("versions", "cuDNN", here if cudnn else "absent", shown, unused)


def _transformer_engine() -> Iterator[Finding]:
    advice = (
        "Megatron imports it too: install the build for this torch and CUDA, or pip uninstall "
        "transformer-engine and its parts"
    )
    yield _imported(
        "TransformerEngine",
        "transformer_engine",
        "transformer_engine.pytorch",
        ("transformer-engine",),
        advice,
    )


def _flash_attention() -> Iterator[Finding]:
    advice = "install the build for this torch and CUDA, or pip uninstall flash-attn"
    yield _imported(
        "flash-attn", "flash_attn", "flash_attn", ("flash-attn", "flash-attn-4"), advice
    )
    if importlib.util.find_spec("flash_attn_interface"):
        yield _imported(
            "flash-attn 3",
            "flash_attn_interface",
            "flash_attn_interface",
            ("flash-attn-3",),
            advice,
        )


def _imported(
    name: str, package: str, module: str, distributions: tuple[str, ...], advice: str
) -> Finding:
    """A finding about an optional package: whether it is installed, and whether `module` can be
    imported.
    """
    if importlib.util.find_spec(package) is None:
        return Finding("versions", name, "absent", "not installed")
    version = next(filter(None, map(version_of, distributions)), "unknown version")
    try:
        importlib.import_module(module)
    except Exception as error:
        return Finding(
            "versions", name, "problem", f"{version}, broken: {_in_one_line(error)}", advice
        )
    return Finding("versions", name, "good", version)


def _apex() -> Iterator[Finding]:
    from cp_ring.megatron import compat

    kind = compat.apex()
    if kind == "other":
        found = (
            f"{version_of('apex') or 'unknown version'}, not NVIDIA's: a package of the same name"
        )
        advice = "pip uninstall apex; NVIDIA's Apex is built from its repository and is not on PyPI"
        yield Finding("versions", "Apex", "problem", found, advice)
        return
    if kind == "":
        yield Finding("versions", "Apex", "absent", "not installed")
        return
    advice = "build NVIDIA's Apex for this torch and CUDA, or pip uninstall apex"
    yield _imported("Apex", "apex", "apex.optimizers", ("apex",), advice)


def _others() -> Iterator[Finding]:
    triton = version_of("triton")
    yield Finding("versions", "Triton", "good" if triton else "absent", triton or "not installed")
    srun = shutil.which("srun")
    if srun is None:
        yield Finding("versions", "Slurm", "absent", "no srun on PATH")
        return
    done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=30)
    if done.returncode:
        yield Finding(
            "versions", "Slurm", "absent", "no cluster: srun is there, without a configuration"
        )
    else:
        yield Finding("versions", "Slurm", "good", done.stdout.strip())


def _devices() -> Iterator[Finding]:
    import torch

    present = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if present else 0):
        properties = torch.cuda.get_device_properties(index)
        about = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, architecture "
            f"{properties.major}.{properties.minor}"
        )
        yield Finding("machine", f"GPU {index}", "good", about)
    if not present:
        yield Finding("machine", "GPU", "absent", "none that torch can use")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding(
        "machine", "CPU", "good", f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
    )
    yield Finding(
        "machine",
        "--cp-ring-cpu",
        "good",
        "inert: CUDA is present" if present else "applies: ranks run on the CPU, over gloo",
    )


def _kernels() -> Iterator[Finding]:
    import torch

    from cp_ring.kernels import OF_CUDA, REGISTRY

    cuda = torch.cuda.is_available()
    for name, home in REGISTRY.items():
        tried = [("cuda", torch.bfloat16)] * (cuda or name in OF_CUDA)
        tried += [("cpu", torch.float32)] * (name not in OF_CUDA)
        device, dtype = tried[0]
        try:
            kernel = importlib.import_module(home).KERNEL
            for device, dtype in tried:
                reason = kernel.rejection(torch.device(device), dtype, 128, 128)
                if not reason:
                    break
        # a package that the kernel uses is broken; the finding on that package says what to do
        except Exception as error:
            reason = f"cannot be used: {_in_one_line(error)}"
        if device == "cuda" and not cuda:
            reason = "; ".join(filter(None, ["no CUDA here", reason]))
        yield Finding(
            "kernels", name, "absent" if reason else "good", reason or f"usable on {device}"
        )


def _patches() -> Iterator[Finding]:
    from cp_ring import patches

    for patch in patches.table():
        rejected = patch["state"].startswith("rejected")
        state = {"not applied": "fits this version"}.get(patch["state"], patch["state"])
        yield Finding("patches", patch["name"], "absent" if rejected else "good", state)


def _limits(found: list[Finding]) -> Iterator[Finding]:
    """Features that jobs on this machine cannot use, because of the findings."""
    from cp_ring.megatron import compat

    usable = {finding.name for finding in found if finding.state == "good"}
    if not any(name.startswith("GPU ") for name in usable):
        yield Finding(
            "limits",
            "launch.device: cuda",
            "absent",
            "rejected without GPUs",
            "jobs with launch.device: auto run on the CPU",
        )
    if "TransformerEngine" not in usable:
        yield Finding(
            "limits",
            "transformer_impl: transformer_engine",
            "absent",
            "not available",
            "give transformer_impl: local",
        )
        if "Apex" not in usable:
            yield Finding(
                "limits",
                "sequence_parallel: true",
                "absent",
                "rejected with torch's norms",
                "leave it out",
            )
    for what, advice in compat.missing_features():
        yield Finding("limits", what, "absent", "not with this megatron-core", advice)


def version_of(distribution: str) -> str | None:
    """The installed version."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_one_line(error: BaseException) -> str:
    text = one_line(error)[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def problems(found: list[Finding]) -> list[str]:
    """One line for each problem: what, and what to do."""
    return [
        f"{finding.name} {finding.found}: {finding.advice}"
        for finding in found
        if finding.state == "problem"
    ]
