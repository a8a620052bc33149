"""`cp-ring bench recurrent`: the convolution and the recurrence of a gated delta net layer, whose
ranks exchange tokens for heads, or pass states.

Both ways get what the layer's first projection makes of the same tokens in the zigzag layout, and
give what its last projection takes. A rank has one thread of the CPU; the kernels are those of
`cp_ring.testing.delta_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_ring import Layout
from cp_ring.comm.states import StatePassing
from cp_ring.comm.transport import Transport, exchange, transport_for
from cp_ring.observe.counters import record
from cp_ring.plan.costs.recurrent_costs import RecurrentSizes, heads_cost, states_cost
from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.exchange.verify_chains import verify_chains
from cp_ring.plan.sizes.device_rates import HOST_RATES
from cp_ring.testing.delta_rule import causal_conv1d, gated_delta_rule
from cp_ring.testing.rank_pool import Ranks
from cp_ring.tools.job.speeds import PREPARED, in_turn

WAYS = ("heads", "states")


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net layer with as many heads of keys as of values, in float32.

    `n` tokens on `cp` ranks, `heads` of `key` and `value` channels.
    """

    n: int
    cp: int
    heads: int
    key: int
    value: int
    width: int = 4

    @property
    def parts(self) -> list[int]:
        """Channels of a head: q, k, v, the gate of the output, and the two gates of the rule."""
        return [self.key, self.key, self.value, self.value, 1, 1]

    @property
    def sizes(self) -> RecurrentSizes:
        """As predictions take them."""
        settings = {
            "linear_key_head_dim": self.key,
            "linear_value_head_dim": self.value,
            "linear_num_key_heads": self.heads,
            "linear_num_value_heads": self.heads,
            "linear_conv_kernel_dim": self.width,
        }
        return RecurrentSizes.from_megatron(settings, "gdn")

    def draw(self) -> tuple[Tensor, Tensor]:
        """What the first projection makes, [n, heads, channels], and the weights of the
        convolution, [heads, channels, width]; the same on every rank.
        """
        generator = torch.Generator().manual_seed(0)
        projected = torch.randn(self.n, self.heads, sum(self.parts), generator=generator)
        channels = sum(self.parts[:3])
        return projected, 0.5 * torch.randn(self.heads, channels, self.width, generator=generator)

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        convolve: Callable[..., Tensor],
        rule: Callable[..., Tensor],
    ) -> Tensor:
        """Outputs [T, heads, value] of x [T, heads, channels]."""
        heads, channels = x.shape[1], sum(self.parts[:3])
        mixed = convolve(
            lambda x, offsets: causal_conv1d(x, weight.flatten(0, 1), offsets),
            x[None, ..., :channels].flatten(2),
            self.width,
        ).unflatten(2, (heads, channels))
        q, k, v = mixed.split(self.parts[:3], -1)
        gate, decay, beta = x[None, ..., channels:].split(self.parts[3:], -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out = rule(
            gated_delta_rule,
            q=q,
            k=k,
            v=v,
            g=-F.softplus(decay[..., 0]),
            beta=beta[..., 0].sigmoid(),
        )
        return (out * F.silu(gate))[0]


class _Exchanged(torch.autograd.Function):
    """The parts of x for each rank leave, and those of others come: [cp, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport) -> Tensor:
        ctx.transport, x = transport, x.contiguous()
        arrived = torch.empty_like(x)
        exchange(transport, list(x), list(arrived), "heads")
        arrived[transport.rank] = x[transport.rank]
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.forward(ctx, gradient, ctx.transport), None


def _by_heads(
    layer: DeltaNet,
    x: Tensor,
    weight: Tensor,
    transport: Transport,
    layout: Layout,
) -> Tensor:
    """Each rank has all tokens of some heads, in the order of the sequence."""
    cp, rank = transport.size, transport.rank
    order = torch.from_numpy(np.concatenate([layout.positions(each) for each in range(cp)]))
    offsets = torch.tensor([0, layer.n], dtype=torch.int32)
    own = _Exchanged.apply(x.unflatten(1, (cp, -1)).transpose(0, 1), transport).flatten(0, 1)
    out = layer.compute(
        own.index_select(0, order.argsort()),
        weight.chunk(cp)[rank],
        lambda function, x, width: function(x, offsets),
        lambda function, **tensors: function(**tensors, cu_seqlens=offsets)[0],
    )
    parts = out.index_select(0, order).unflatten(0, (cp, -1))
    return _Exchanged.apply(parts, transport).transpose(0, 1).flatten(1, 2)


def prepare(group: Any, way: str, layer: DeltaNet) -> tuple[Tensor, Tensor, dict[str, int]]:
    """On a rank: makes a round of forward and backward and runs it once. Returns this rank's part
    of the outputs and of the gradients, and the bytes by kind that it has sent.
    """
    transport = transport_for(group, torch.device("cpu"))
    assert transport is not None
    layout = Layout.zigzag(layer.n, layer.cp)
    x, weight = layer.draw()
    x = layout.shard(x, transport.rank, 0).clone().requires_grad_()
    chains = Chains.build(layout, np.zeros(1, np.int64))
    verify_chains(chains, layer.width)
    passing = StatePassing(chains, transport, x.device)

    def one_round() -> tuple[Tensor, Tensor]:
        if way == "states":
            out = layer.compute(x, weight, passing.convolve, passing.delta_rule)
        else:
            out = _by_heads(layer, x, weight, transport, layout)
        return out.detach(), torch.autograd.grad(out.sin().sum(), x)[0]

    PREPARED[way] = one_round
    with record() as counted:
        out, gradient = one_round()
    return out, gradient, dict(counted.bytes_by_kind)


def run(layers: list[DeltaNet], repeats: int, ranks: Ranks | None = None) -> list[dict[str, Any]]:
    """Results {way, cp, median_s, min_s, max_s, bytes, planned_bytes, difference, times}: seconds
    of forward and backward on the slowest rank, and bytes that all ranks send.

    difference: of outputs and gradients from those of heads, relative to their norm. ranks: some
    that are there already.
    """
    pool = ranks or Ranks(max(layer.cp for layer in layers))
    results = []
    for layer in layers:
        chains = Chains.build(Layout.zigzag(layer.n, layer.cp), np.zeros(1, np.int64))
        planned = {
            "heads": heads_cost(layer.sizes, layer.n, layer.cp, HOST_RATES, 1),
            "states": states_cost(layer.sizes, chains, HOST_RATES, 1),
        }
        parts = {way: pool.run(prepare, layer.cp, way, layer) for way in WAYS}
        whole = {way: torch.cat([torch.cat(part[:2], -1) for part in parts[way]]) for way in WAYS}
        times = in_turn({way: (pool, layer.cp, way) for way in WAYS}, repeats)
        for way in WAYS:
            difference = (whole[way] - whole["heads"]).norm() / whole["heads"].norm()
            results.append(
                {
                    "way": way,
                    "cp": layer.cp,
                    **times[way],
                    "bytes": sum(sum(part[2].values()) for part in parts[way]),
                    "planned_bytes": planned[way].bytes,
                    "difference": float(difference),
                }
            )
    if ranks is None:
        pool.close()
    return results
