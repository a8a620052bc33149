"""What a step of the GPU checks gets: the device, sizes for it, and the file of results, to which
it appends lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from dataclasses import dataclass

import torch

from cp_ring.kernels import REGISTRY

ERROR = 1.5e-2
"""Limit of the error norm divided by the norm, of a ring in bfloat16. A key left out of 4,096 gives
2e-2.
"""


@dataclass(frozen=True)
class RankSizes:
    """Sizes of one rank: `tokens` of one stream, h query heads, g key/value heads, head size d
    (queries, keys) and e (values).
    """

    tokens: int = 8192
    h: int = 32
    g: int = 8
    d: int = 128
    e: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def draw(self, tokens, seed=0):
        """q, k, v, dout: [tokens, 1, heads, head size]."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shapes = (self.h, self.d), (self.g, self.d), (self.g, self.e), (self.h, self.e)
        return [
            torch.randn(tokens, 1, *x, generator=generator, device=self.device, dtype=self.dtype)
            for x in shapes
        ]


class Job:
    """One step of the checks.

    Attributes:
        sizes: those of one rank: 8,192 tokens, 32 query heads, 8 key/value heads of 128 in bf16;
        small ones on a fake GPU.
        values: whether those of the device mean anything, which on a fake GPU no check is held
        against.
        failed: whether a check did not hold.
    """

    def __init__(self, step, device, out):
        self.step, self.out, self.failed = step, out, False
        self.kind, self.values, self.device = device, device == "cuda", torch.device("cuda")
        self.sizes = RankSizes() if self.values else RankSizes(128, 4, 2)
        self.repeats = 5 if self.values else 1

    def row(self, **facts):
        """Appends one line of results."""
        with open(self.out, "a") as file:
            file.write(json.dumps({"step": self.step, **facts}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def check(self, what, value, limit, **facts):
        """Appends a line with a value and its limit; the step fails if the value exceeds the limit
        or is NaN.
        """
        holds = not self.values or (not math.isnan(value) and value <= limit)
        self.failed = self.failed or not holds
        self.row(check=what, value=value, limit=limit, holds=holds, **facts)

    def fail(self, what, **facts):
        """Appends a line of what did not run; the step fails."""
        self.failed = True
        self.row(check=what, holds=False, **facts)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=self.sizes.dtype)

    def draw(self, tokens, seed=0):
        """q, k, v, dout, [1, tokens, heads, head size]."""
        return [x.transpose(0, 1).contiguous() for x in self.sizes.draw(tokens, seed)]

    def kernels(self):
        """The kernels that support the sizes, fastest first, without the reference; a line for each
        that does not.
        """
        for name, home in REGISTRY.items():
            if name == "reference":
                continue
            kernel = importlib.import_module(home).KERNEL
            reason = kernel.rejection(self.device, self.sizes.dtype, self.sizes.d, self.sizes.e)
            if reason is None:
                yield kernel
            else:
                self.row(kernel=name, rejected=reason)
