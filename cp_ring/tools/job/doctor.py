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


def _version(name: str, state: State, found: str, advice: str = "") -> Finding:
    return Finding("versions", name, state, found, advice)


def _limit(name: str, found: str, advice: str = "") -> Finding:
    return Finding("limits", name, "absent", found, advice)


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
    findings = [finding for part in parts for finding in _findings_of(part)]
    return findings + _findings_of(partial(_limits, findings))


def _findings_of(part: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return [*part()]
    except ImportError as error:
        return [_limit("doctor", f"not examined: {error}")]


def main() -> int:
    """`cp-ring doctor` without the packages of its command: all findings as lines."""
    findings = examine()
    for finding in findings:
        start = f"{finding.section}: {finding.name}: {finding.state}"
        print(start, finding.found, finding.advice, sep="  ")
    lines = problems(findings)
    for line in lines:
        print(f"cp_ring: problem: {line}", file=sys.stderr)
    return int(bool(lines))


def _python() -> Iterator[Finding]:
    yield _version("python", "good", platform.python_version())


def _requirements() -> Iterator[Finding]:
    """The required packages: installed or not, and in a supported version or not."""
    yield _version("cp-ring", "good", version_of("cp-ring") or "not installed: run from its source")
    texts = importlib.metadata.requires("cp-ring") or [] if version_of("cp-ring") else []
    for text in sorted({text.partition(";")[0].strip() for text in filter(_concerns_jobs, texts)}):
        name, needed = _REQUIREMENT.match(text).groups()  # type: ignore[union-attr]
        version = version_of(name)
        if version is None:
            yield _version(name, "problem", "not installed", f"pip install '{text}'")
        elif not _within(needed, version):
            advice = f"cp_ring needs {needed}: pip install '{text}'"
            yield _version(name, "problem", version, advice)
        elif name == "torch":
            yield _version(name, "good", version)


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
        yield _version("megatron-core", "problem", version, str(error))
        return
    state = compat.development() or f"in range {compat.SUPPORTED}"
    yield _version("megatron-core", "good", f"{version} ({state})")


def _torch_libraries() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        advice = "GPUs cannot be used"
        yield _version("CUDA", "absent", "this torch is a build for the CPU", advice)
        return
    usable = torch.cuda.is_available()
    state: State = "good" if usable else "absent"
    unused = "" if usable else "not used: there is no GPU"
    yield _version("CUDA", state, torch.version.cuda, unused)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield _version("NCCL", state, ".".join(map(str, torch.cuda.nccl.version())), unused)
    else:
        yield _version("NCCL", "absent", "this torch is built without it", "GPUs cannot be used")
    try:
        cudnn = torch.backends.cudnn.version()
    except Exception as error:
        advice = (
            "torch cannot load it: let only the nvidia-cudnn package that torch asks for be on "
            "LD_LIBRARY_PATH"
        )
        yield _version("cuDNN", "problem", _in_one_line(error), advice)
        return
    shown = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "not there"
    yield _version("cuDNN", state if cudnn else "absent", shown, unused)


def _transformer_engine() -> Iterator[Finding]:
    advice = (
        "Megatron imports it too: install the build for this torch and CUDA, or pip uninstall "
        "transformer-engine and its parts"
    )
    names = "transformer_engine.pytorch", "transformer-engine"
    yield _imported("TransformerEngine", *names, advice=advice)


def _flash_attention() -> Iterator[Finding]:
    advice = "install the build for this torch and CUDA, or pip uninstall flash-attn"
    names = "flash-attn", "flash-attn-4"
    yield _imported("flash-attn", "flash_attn", *names, advice=advice)
    if importlib.util.find_spec("flash_attn_interface"):
        yield _imported("flash-attn 3", "flash_attn_interface", "flash-attn-3", advice=advice)


def _imported(name: str, module: str, *distributions: str, advice: str) -> Finding:
    """A finding about an optional package: whether it is installed, and whether `module` can be
    imported.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return _version(name, "absent", "not installed")
    version = next(filter(None, map(version_of, distributions)), "unknown version")
    try:
        importlib.import_module(module)
    except Exception as error:
        return _version(name, "problem", f"{version}, broken: {_in_one_line(error)}", advice)
    return _version(name, "good", version)


def _apex() -> Iterator[Finding]:
    from cp_ring.megatron import compat

    kind = compat.apex()
    if kind == "other":
        version = version_of("apex") or "unknown version"
        found = f"{version}, not NVIDIA's: a package of the same name"
        advice = "pip uninstall apex; NVIDIA's Apex is built from its repository and is not on PyPI"
        yield _version("Apex", "problem", found, advice)
        return
    if kind == "":
        yield _version("Apex", "absent", "not installed")
        return
    advice = "build NVIDIA's Apex for this torch and CUDA, or pip uninstall apex"
    yield _imported("Apex", "apex.optimizers", "apex", advice=advice)


def _others() -> Iterator[Finding]:
    triton = version_of("triton")
    yield _version("Triton", "good" if triton else "absent", triton or "not installed")
    if shutil.which("srun") is None:
        yield _version("Slurm", "absent", "no srun on PATH")
    elif version := output_of("srun", "--version"):
        yield _version("Slurm", "good", version)
    else:
        yield _version("Slurm", "absent", "no cluster: srun is there, without a configuration")


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


def _limits(findings: list[Finding]) -> Iterator[Finding]:
    """Features that jobs on this machine cannot use, because of the findings."""
    from cp_ring.megatron import compat

    usable = {finding.name for finding in findings if finding.state == "good"}
    if not any(name.startswith("GPU ") for name in usable):
        yield _limit(
            "launch.device: cuda",
            "rejected without GPUs",
            "jobs with launch.device: auto run on the CPU",
        )
    if "TransformerEngine" not in usable:
        yield _limit(
            "transformer_impl: transformer_engine",
            "not available",
            "give transformer_impl: local",
        )
        if "Apex" not in usable:
            yield _limit(
                "sequence_parallel: true",
                "rejected with torch's norms",
                "leave it out",
            )
    for what, advice in compat.missing_features():
        yield _limit(what, "not with this megatron-core", advice)


def version_of(distribution: str) -> str | None:
    """The installed version."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str:
    """What a program prints; "" where it is not installed, fails, or takes more than 30 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _in_one_line(error: BaseException) -> str:
    text = one_line(error)[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def problems(findings: list[Finding]) -> list[str]:
    """One line for each problem: what, and what to do."""
    return [
        f"{finding.name} {finding.found}: {finding.advice}"
        for finding in findings
        if finding.state == "problem"
    ]
