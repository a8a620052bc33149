"""What ranks run on the fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cp_ring
from tests.fakegpu.accesses import mark, recorded
from tests.fakegpu.plants import PLANTS


def rings(
    cases: dict[str, dict[str, Any]],
    steps: int = 3,
    planted: bool = False,
    captured: bool = False,
) -> None:
    """Calls of `ring_attention` one after another, each forward and backward `steps` times;
    "<case> <step>" is the part of the log.

    planted: a case has the name of a fault, which is there in its calls. captured: then the calls
    are captured as a graph, in the part "<case> capture".
    """
    with recorded():
        for name, options in cases.items():
            with PLANTS[name]() if planted else nullcontext():
                _steps(name, lambda options=options: attend(**options), steps, captured)
    mark("end")


def _steps(name: str, call: Callable[[], None], steps: int, captured: bool) -> None:
    for step in range(steps):
        mark(f"{name} {step}")
        call()
    if captured:
        mark(f"{name} capture")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()


def attend(
    tokens: int = 256, sizes: tuple[int, ...] = (4, 2, 64, 64), sink: bool = False, **options: Any
) -> None:
    """Of `tokens` on each rank; sizes are h, g, d, e."""
    group = dist.group.WORLD if dist.is_initialized() else None
    h, g, d, e = sizes
    q, k, v = (_empty(1, tokens, *shape) for shape in ((h, d), (g, d), (g, e)))
    leaves = [q, k, v]
    if sink:
        leaves.append(_empty(h))
        options["sink"] = leaves[3]
    out = cp_ring.ring_attention(q, k, v, group, **options)
    # The engine's own thread would free the tensors of a step while the next one begins: how much
    # memory is needed would be chance.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(out, leaves, torch.empty_like(out))


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
