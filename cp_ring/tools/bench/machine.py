"""The machine and the software of a measurement; and `cp-ring bench rates`: what the machine's
kernel, memory and links do in a second, as `cp-ring plan` assumes them.

The kernel is the one that `auto` chooses, on one GPU or on one thread of the CPU. A link is
measured between two processes of this machine, over gloo on the CPU and over NCCL between two GPUs,
where each sends and receives at the same time.
"""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.tools.job.doctor import version_of
from cp_ring.tools.job.speeds import exchange, kernel_rates

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
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": (
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}"
        ),
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


def run(megabytes: int = 32, repeats: int = 5) -> dict[str, Any]:
    """Rates {device, kernel, tflops, memory_gb_s, call_us, link_gb_s}, the best of `repeats`; no
    link (None) with one GPU.

    `cp_ring.plan.sizes.device_rates.read` reads a file of them.
    """
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        **kernel_rates(torch.device("cuda" if cuda else "cpu"), repeats, megabytes),
        "link_gb_s": _link(megabytes, repeats, cuda),
    }


def _link(megabytes: int, repeats: int, cuda: bool) -> float | None:
    from cp_ring.testing.rank_pool import Ranks

    if cuda and torch.cuda.device_count() < 2:
        return None
    ranks = Ranks(2, backend="nccl" if cuda else "gloo")
    try:
        return megabytes * 2**20 / max(ranks.run(exchange_seconds, 2, megabytes, repeats)) / 1e9
    finally:
        ranks.close()


def exchange_seconds(group: Any, megabytes: int, repeats: int) -> float:
    """On a rank: the least seconds in which two ranks exchange so many MiB; the first exchange does
    not count.
    """
    cuda = dist.get_backend(group) == "nccl"
    peer = 1 - dist.get_rank(group)
    data = torch.zeros(megabytes * 2**20, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    return min([exchange(data, peer, peer, group) for _ in range(repeats + 1)][1:])
