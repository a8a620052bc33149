"""`cp-ring bench wire`: what codecs save where the wire is slow, on a link of a set speed.

Two ranks, each in a network namespace of its own, are joined by a throttled wire. Its speed is such
that the messages of one forward and backward with plain keys take a given multiple of the time that
both take on the free wire. Two cases run over it: multi-latent attention with the proportions of
DeepSeek-V3, scaled down, and plain attention in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_ring import LatentKeys, Layout, Mask, Plan, ring_attention
from cp_ring.testing.rank_pool import Ranks
from cp_ring.tools.job.speeds import PREPARED, in_turn, throttled_link


@dataclass(frozen=True)
class WireCase:
    """Attention of `tokens` on two ranks in float32. With `latent` > 0 keys and values are made
    from latents of that size.

    key, rope, value: sizes of a head's own part of the key, of the rotated part, and of the value.
    """

    name: str
    tokens: int
    heads: int
    key: int
    rope: int
    value: int
    latent: int = 0
    wires: tuple[str, ...] = ("plain",)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's plain keys and values."""
        return self.tokens // 2 * self.heads * (self.key + self.rope + self.value) * 4


def cases(tokens: int) -> list[WireCase]:
    """DeepSeek-V3 has 128 heads of 128 + 64 and 128, and latents of 512; here all sizes are a
    quarter.
    """
    return [
        WireCase("multi-latent attention", tokens, 32, 32, 16, 32, 128, ("plain", "latent")),
        WireCase("attention", tokens, 8, 64, 0, 64, wires=("plain", "int8", "fp8")),
    ]


def prepare(group: Any, case: WireCase) -> None:
    """On a rank: makes the tensors of a case, and runs each codec once."""
    plan = Plan.build(Mask.causal(case.tokens), Layout.zigzag(case.tokens, 2))
    size = case.tokens // 2
    generator = torch.Generator().manual_seed(group.rank())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    q = normal(1, size, case.heads, case.key + case.rope)
    dout = normal(1, size, case.heads, case.value).detach()
    if case.latent:
        width = case.heads * (case.key + case.value)
        weight = (normal(width, case.latent).detach() / case.latent**0.5).requires_grad_()
        leaves = [normal(1, size, case.latent), normal(1, size, case.rope), weight]
    else:
        leaves = [normal(1, size, case.heads, case.key), normal(1, size, case.heads, case.value)]

    def one_round(wire: str) -> None:
        k: Any = leaves[0]
        v: Tensor | None = leaves[1]
        if case.latent:
            k, v = LatentKeys(k, leaves[1], leaves[2], case.heads, case.key), None
        out = ring_attention(q, k, v, group, plan=plan, wire=wire)
        torch.autograd.grad(out, [q, *leaves], dout)

    for wire in case.wires:
        PREPARED[wire] = partial(one_round, wire)
        PREPARED[wire]()


def run(tokens: int, ratio: float, repeats: int) -> list[dict[str, Any]]:
    """Results {case, wire, ratio, free_s, bytes_per_s, median_s, min_s, max_s, faster}; `faster` is
    plain's time over this one.

    Raises `NoNamespacesError`.
    """
    with throttled_link() as (ranks, throttle):
        return [
            result
            for case in cases(tokens)
            for result in _measure(throttle, ranks, case, ratio, repeats)
        ]


def _measure(
    throttle: Callable[[float | None], None],
    ranks: Ranks,
    case: WireCase,
    ratio: float,
    repeats: int,
) -> list[dict[str, Any]]:
    """Each round runs every codec once; a time is that of the slower rank."""
    throttle(None)
    ranks.run(prepare, 2, case)
    free = in_turn({"plain": (ranks, 2, "plain")}, repeats)["plain"]["median_s"]
    # Keys travel in forward and in backward, and their gradients in backward.
    speed = 3 * case.shard_bytes / (ratio * free)
    throttle(speed)
    measured = in_turn({wire: (ranks, 2, wire) for wire in case.wires}, repeats)
    return [
        {
            "case": case.name,
            "wire": wire,
            "ratio": ratio,
            "free_s": free,
            "bytes_per_s": speed,
            **times,
            "faster": measured["plain"]["median_s"] / times["median_s"],
        }
        for wire, times in measured.items()
    ]
