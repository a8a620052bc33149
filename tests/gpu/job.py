"""What a step of the GPU checks gets: the device, sizes for it, and the file of results, to which
it appends lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cp_ring.kernels import REGISTRY, AttentionKernel
from tests.gpu.one_device import RankSizes

ERRORS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Limit of the error norm divided by the norm, of one kernel call in a dtype. A key left out of
4,096 gives 2e-2.
"""


class Job:
    """One step of the checks.

    Attributes:
        sizes: those of one rank: 8,192 tokens, 32 query heads, 8 key/value heads of 128 in bf16;
        small ones on the CPU.
        tiles: (queries, keys, causal) of the tiles of a causal ring with several sources a hop, and
        two that are uneven.
        cuda: whether there is a GPU, real or fake. large: whether sizes are those of a real one.
        values: whether those of the device mean anything, which on a fake GPU no check is held
        against.
        failed: whether a check did not hold.
    """

    def __init__(self, step: str, device: str, out: str):
        self.step, self.out, self.failed = step, out, False
        self.values, self.cuda, self.large = device != "fake", device != "cpu", device == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        size = 128 if self.cuda else 16
        small = RankSizes(128, 4, 2, size, size, torch.bfloat16, self.device.type)
        self.sizes = RankSizes() if self.large else small
        part = 1 if self.large else 32
        tiles = ((8192, 4096, False), (4096, 8192, False), (5888, 5888, True), (2304, 5888, False))
        self.tiles = [(queries // part, keys // part, causal) for queries, keys, causal in tiles]
        self.repeats = 5 if self.large else 1

    def row(self, **facts: Any) -> None:
        """Appends one line of results."""
        with open(self.out, "a") as file:
            file.write(json.dumps({"step": self.step, **facts}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def check(self, what: str, value: float, limit: float, **facts: Any) -> None:
        """Appends a line with a value and its limit; the step fails if the value exceeds the limit
        or is NaN.
        """
        holds = not self.values or (not math.isnan(value) and value <= limit)
        self.failed = self.failed or not holds
        self.row(check=what, value=value, limit=limit, holds=holds, **facts)

    def fail(self, what: str, **facts: Any) -> None:
        """Appends a line of what did not run; the step fails."""
        self.failed = True
        self.row(check=what, holds=False, **facts)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def drawn(self) -> torch.Tensor:
        """The state of torch's default generator of the device, which hidden dropout draws from."""
        return torch.cuda.get_rng_state() if self.cuda else torch.get_rng_state()

    def draw(
        self, queries: int, keys: int, h: int = 0, g: int = 0, seed: int = 0
    ) -> list[torch.Tensor]:
        """q, k, v, dout of a tile, [1, tokens, heads, head size]; h and g are those of `sizes` by
        default.
        """
        s, generator = self.sizes, torch.Generator(self.device).manual_seed(seed)
        h, g = h or s.h, g or s.g
        shapes = (1, queries, h, s.d), (1, keys, g, s.d), (1, keys, g, s.e), (1, queries, h, s.e)
        return [
            torch.randn(x, generator=generator, device=self.device, dtype=s.dtype) for x in shapes
        ]

    def kernels(self, dtype: torch.dtype | None = None) -> Iterator[AttentionKernel]:
        """The kernels that support the sizes, fastest first, without the reference; a line for each
        that does not.
        """
        for name, home in REGISTRY.items():
            if name == "reference":
                continue
            kernel = importlib.import_module(home).KERNEL
            reason = kernel.rejection(
                self.device, dtype or self.sizes.dtype, self.sizes.d, self.sizes.e
            )
            if reason is None:
                yield kernel
            else:
                self.row(kernel=name, rejected=reason)


@contextmanager
def libraries(device: str) -> Iterator[None]:
    """The libraries of a GPU; on the CPU emulations of them."""
    if device in ("cuda", "fake"):
        yield
        return
    from tests.gpu.emulated import emulated

    with emulated():
        yield
