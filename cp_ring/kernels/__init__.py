"""Attention kernels for one tile, and the choice among them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import torch

from cp_ring.errors import KernelError
from cp_ring.kernels.base import (
    AttentionKernel,
    Capabilities,
    LimitedVarlen,
    MaxLogitKernel,
    determinism,
    deterministic,
    switched,
)
from cp_ring.runtime import RUNTIME

__all__ = [
    "REGISTRY",
    "AttentionKernel",
    "Capabilities",
    "choose",
    "determinism",
    "deterministic",
    "switched",
]

REGISTRY = {
    "transformer_engine": "cp_ring.kernels.transformer_engine",
    "flash": "cp_ring.kernels.flash",
    "flash_aten": "cp_ring.kernels.flash_aten",
    "efficient": "cp_ring.kernels.efficient",
    "cpu": "cp_ring.kernels.cpu",
    "reference": "cp_ring.kernels.reference",
}
"""Kernel names and their modules, in the order in which `auto` asks them. A module holds its kernel
as `KERNEL`, and is imported when the kernel is first asked whether it supports some tensors.

One assignment adds a kernel of another package: `cp_ring.kernels.REGISTRY["mine"] =
"my_package.my_kernel"`. From then on `ring_attention(..., kernel="mine")` and
`Options(kernel="mine")` accept the name; `kernel="auto"` tries it last.
"""

OF_CUDA = frozenset(("transformer_engine", "flash", "flash_aten", "efficient"))
"""Kernels that only support tensors on CUDA devices: for other tensors "auto" asks them last."""

_log = logging.getLogger(__name__)


def choose(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    e: int,
    packed: bool = False,
    max_logit: bool = False,
) -> AttentionKernel:
    """Return the named kernel, or for "auto" the first in the registry that supports these tensors.
    The choice is logged once.

        kernel = choose("auto", device=q.device, dtype=q.dtype, d=64, e=64)

    `d` is the head size of queries and keys, `e` that of values. `packed` is True if the plan has
    many tiles of many sizes (packed documents). Then kernels that take many tiles in one call come
    first, because the others pay for each tile. With `max_logit` the kernel is a `MaxLogitKernel`.

    Raises `KernelError` if the name is unknown or the kernel rejects these tensors. A named kernel
    is never replaced by another.
    """
    if name != "auto" and name not in REGISTRY:
        raise KernelError(f"kernel={name!r}: unknown; known are auto, {', '.join(REGISTRY)}")
    names = (
        [name]
        if name != "auto"
        else sorted(REGISTRY, key=lambda each: each in OF_CUDA and device.type != "cuda")
    )
    candidates = tuple((each, REGISTRY[each]) for each in names)
    exact = deterministic(), switched()
    return _chosen(name, candidates, (device, dtype, d, e), packed, exact, max_logit)


@RUNTIME.cache(maxsize=256)
def _chosen(
    name: str,
    candidates: tuple[tuple[str, str], ...],
    kind: tuple[torch.device, torch.dtype, int, int],
    packed: bool,
    exact: tuple[bool, bool],
    max_logit: bool,
) -> AttentionKernel:
    """`choose` with everything that it depends on as arguments, cached for the next call of
    attention.

    exact: whether the call asks for determinism, and whether torch's own switch is on.
    """
    reasons = []
    for kernel in _in_order((home for _, home in candidates), packed):
        reason = kernel.rejection(*kind)
        if reason is None and packed and isinstance(kernel, LimitedVarlen):
            reason = kernel.varlen_rejection(*kind[1:])
        if reason is None and exact[0] and not kernel.capabilities.deterministic:
            reason = "does not give the same bits in every run, which deterministic algorithms need"
        if reason is None and max_logit:
            reason = (
                kernel.max_logit_rejection()
                if isinstance(kernel, MaxLogitKernel)
                else "does not tell the largest logits, which TransformerEngine does"
            )
        if reason is None:
            _log.info(
                "attention kernel: %s (%s; on %s, %s, head sizes %d and %d)",
                kernel.name,
                name,
                *kind,
            )
            return kernel
        reasons.append(f"{kernel.name} {reason}")
    raise KernelError(f"kernel={name!r}: {'; '.join(reasons)}")


def _in_order(homes: Iterator[str], packed: bool) -> Iterator[AttentionKernel]:
    """Yield the kernels of these modules; for packed tiles, first those that take many tiles in one
    call.
    """
    later = []
    for home in homes:
        kernel: AttentionKernel = importlib.import_module(home).KERNEL
        if packed and (not kernel.capabilities.varlen or kernel.capabilities.slow):
            later.append(kernel)
        else:
            yield kernel
    yield from later
