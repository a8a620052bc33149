"""The machine and the software of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = (
    "cp-ring",
    "torch",
    "numpy",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "ring-attention-pytorch",
    "ringattention",
    "jax",
)


def facts() -> dict[str, Any]:
    """Date, machine, load, and the versions of the installed packages among `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
