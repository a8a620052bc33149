"""Passes the states of recurrent layers from rank to rank, where attention would send keys.

The state after a segment of tokens is an affine function of the state before it, A S + B. Each rank
finds A and B of the segments that hand their state on, by the layer's own kernel: columns of the
state do not mix, so one call for the values [v, 0] from the state [0, I] ends with [B, A]. The
states then pass from segment to segment, one message and one product of matrices each, and a second
call from the right states gives the outputs. Of Mamba-2, A is a number, the decay of a head over
the segment. Neither A nor any token travels, apart from the halo of the convolution. Backward
passes the gradients of the states the other way.

Shapes: T tokens of this rank, of all batch rows; h heads; k and v, channels of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_ring.comm.transport import Transport, exchange
from cp_ring.plan.exchange.chains import Chains, Swap
from cp_ring.plan.ranges import Ints

_BY_VALUE = ("v", "w")  # what has the channels of values
_INERT = -1e4  # a time step whose softplus is 0: the state does not change


class StatePassing:
    """What recurrent layers of one rank do with the tokens of `chains`; makes its tensors once."""

    def __init__(self, chains: Chains, transport: Transport, device: torch.device):
        self._chains, self.transport, self.device = chains, transport, device
        plan = self._plan = chains.steps(transport.rank)
        self.segments = len(plan.offsets) - 1
        self.goes_on, self.hands_on = self._tensor(plan.goes_on), self._tensor(plan.hands_on)
        self.cu_seqlens = self._tensor(plan.offsets).int()
        steps = [
            (_Trip(swap, self), self._tensor(given), self._tensor(gone))
            for swap, given, gone in plan.steps
        ]
        self.steps = [(trip, given, gone) for trip, given, gone in steps if trip or len(given)]
        ends = [plan.offsets[i : i + 2].tolist() for i in plan.hands_on.tolist()]
        sizes = self._sizes = [end - start for start, end in ends]
        self._handed = F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(device, torch.int32)
        self._ranges = _joined(ends)
        self._halo, self._parts = lru_cache(self._make_halo), lru_cache(self._make_parts)

    def _tensor(self, x: Ints) -> Tensor:
        return torch.from_numpy(x).to(self.device)

    def _make_halo(self, width: int) -> tuple[_Trip, Tensor, Tensor, Tensor]:
        halo = self._chains.halo(self.transport.rank, width)
        order, offsets, own = map(self._tensor, (halo.order, halo.offsets, halo.own))
        return _Trip(halo.swap, self), order, offsets.int(), own

    def _make_parts(
        self, width: int
    ) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], Tensor]:
        """For a kernel that convolves and scans batch rows, which take one state and end with one:
        the parts of this rank's tokens, those that hand their state on, and where tokens are among
        the outputs of all parts.

        Of parts of the same length [parts]: first segment and last one, and [parts, width - 1 +
        tokens]: places in tokens, halo and one token of nothing, and the numbers of segments.
        """
        plan, halo = self._plan, self._chains.halo(self.transport.rank, width)
        held, nothing = len(halo.own), len(halo.order)
        first = np.unique(np.concatenate([[0], plan.goes_on, plan.hands_on + 1]))
        first = first[first < self.segments]
        every = []
        for start, end in zip(first, [*first[1:], self.segments], strict=True):
            near = halo.order[halo.offsets[start] : halo.offsets[start + 1]]
            tokens = np.arange(plan.offsets[start], plan.offsets[end])
            index = np.concatenate([near[near >= held], tokens])
            index = np.pad(
                index, (width - 1 + len(tokens) - len(index), 0), constant_values=nothing
            )
            numbers = np.repeat(np.arange(end - start), np.diff(plan.offsets[start : end + 1]))
            every.append((start, end - 1, index, np.pad(numbers, (width - 1, 0))))
        handing = [part for part in every if part[1] in plan.hands_on]
        batches = self._together(every)
        places = torch.cat([index[:, width - 1 :].flatten() for _, _, index, _ in batches])
        return batches, self._together(handing), places.argsort()

    def _together(self, parts: Sequence[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
        """Parts of the same length as one batch."""
        lengths = sorted({len(part[2]) for part in parts})
        alike = [[part for part in parts if len(part[2]) == length] for length in lengths]
        return [
            tuple(self._tensor(np.stack(x)) for x in zip(*batch, strict=True)) for batch in alike
        ]

    def convolve(self, function: Callable[..., Tensor], x: Tensor, width: int) -> Tensor:
        """The causal convolution over `width` tokens of x [1, T, d], by `function(x, cu_seqlens)`,
        which does it for segments without tokens before them.
        """
        trip, order, offsets, own = self._halo(width)
        arrived = _Swapped.apply(x[0].index_select(0, trip.source), trip)
        whole = torch.cat([x[0], arrived]).index_select(0, order)
        return function(whole[None], offsets).index_select(1, own)

    def delta_rule(self, function: Callable[..., Any], **tensors: Tensor) -> Tensor:
        """Outputs [1, T, h, v] of a gated delta rule of fla, from tensors [1, T, h, ...]: q, k, v
        and gates.
        """
        k, v = (tensors[name].shape[-1] for name in "kv")
        heads, dtype = tensors["v"].shape[2], torch.promote_types(tensors["v"].dtype, torch.float32)
        eye = torch.eye(k, k + v, dtype=dtype, device=self.device).roll(v, 1)
        maps = eye.expand(len(self.hands_on), heads, -1, -1).contiguous()
        if self._ranges:
            handed = {
                name: F.pad(x, (0, k)) if name in _BY_VALUE else x
                for name, x in tensors.items()
                for x in [torch.cat([x[:, start:end] for start, end in self._ranges], 1)]
            }
            maps = function(
                **handed, initial_state=maps, output_final_state=True, cu_seqlens=self._handed
            )[1].to(dtype)
        states = self.passed(maps[..., v:], maps[..., :v], tensors["v"])
        return function(**tensors, initial_state=states, cu_seqlens=self.cu_seqlens)[0]

    def mamba(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, *params: Tensor, **named: Any
    ) -> Tensor:
        """Outputs [1, T, d] of `mamba_split_conv1d_scan_combined` of mamba_ssm, from z, x, B, C and
        dt of the tokens [1, T, ...].

        weight: of the convolution. params: its bias, the bias of dt, and the A of each head.
        """
        (channels, width), heads = weight.shape, len(params[-1])
        z, trip = x.shape[2] - heads - channels, self._halo(width)[0]
        arrived = _Swapped.apply(x[0, :, z:-heads].index_select(0, trip.source), trip)
        near = F.pad(arrived, (z, 0, 0, 1))  # and one token of nothing
        whole = torch.cat([x[0], F.pad(near, (0, heads), value=_INERT)])
        every, handing, places = self._parts(width)

        def run(index: Tensor, numbers: Tensor, **more: Any) -> Any:
            tokens = whole.index_select(0, index.flatten()).unflatten(0, index.shape)
            return function(tokens, weight, *params, **named | more, seq_idx=numbers.int())

        dtype = torch.promote_types(x.dtype, torch.float32)
        sizes = z // heads, (channels - z) // 2 // named["ngroups"]
        steps = F.softplus(x[0, :, -heads:].to(dtype) + params[1]) * params[2]
        decay, ends = steps.new_zeros(0, heads), steps.new_zeros(0, heads, *sizes)
        if handing:
            handed = torch.cat([steps[start:end] for start, end in self._ranges])
            decay = torch.stack([part.sum(0) for part in handed.split(self._sizes)]).exp()
            finals = [run(*part[2:], return_final_states=True)[1].to(dtype) for part in handing]
            ends = torch.cat(finals)[torch.cat([last for _, last, *_ in handing]).argsort()]
        states = self.passed(decay[..., None, None], ends.flatten(2)[:, :, None], x)
        given = [
            {} if states is None else {"initial_states": states[first].reshape(-1, heads, *sizes)}
            for first, *_ in every
        ]
        outs = [run(*part[2:], **each) for part, each in zip(every, given, strict=True)]
        whole = torch.cat([out[:, width - 1 :].flatten(0, 1) for out in outs])
        return whole.index_select(0, places)[None]

    def passed(self, a: Tensor, b: Tensor, like: Tensor) -> Tensor | None:
        """The state before each segment, [segments, h, k, v], 0 where it begins anew; None if no
        state passes here.

        a: [segments that hand on, h, k, k]; b: [segments that hand on, h, k, v]. like: a tensor
            with a gradient wherever one of another rank has one.
        """
        if not (len(self.goes_on) or len(self.hands_on)):
            return None
        given = _Passed.apply(self, a, b, like)
        return b.new_zeros(self.segments, *b.shape[1:]).index_copy(0, self.goes_on, given)


class _Trip:
    """A swap with its places on the device."""

    def __init__(self, swap: Swap, of: StatePassing):
        self.source, self.target = of._tensor(swap.source), of._tensor(swap.target)
        self.leaving, self.arriving = swap.leaving.tolist(), swap.arriving.tolist()
        self._transport = of.transport

    def __bool__(self) -> bool:
        return any(self.leaving) or any(self.arriving)

    def go(self, x: Tensor, kind: str, back: bool = False) -> Tensor:
        """What arrives where x leaves, both in the order of ranks."""
        leaving, arriving = self.leaving, self.arriving
        if back:
            leaving, arriving = arriving, leaving
        arrived = x.new_empty(sum(arriving), *x.shape[1:])
        parts, places = x.split(leaving), arrived.split(arriving)
        exchange(self._transport, parts, places, kind)
        here = self._transport.rank
        places[here].copy_(parts[here])
        return arrived


class _Swapped(torch.autograd.Function):
    """Tokens in the order of the ranks that get them, to a halo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        arrived = trip.go(x, "halo")
        return arrived.new_empty(arrived.shape).index_copy_(0, trip.target, arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        return trip.go(gradient.index_select(0, trip.target), "halo", back=True), None


class _Passed(torch.autograd.Function):
    """From A and B of the segments that hand on, the states of those that go on."""

    @staticmethod
    def forward(ctx: Any, passing: StatePassing, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
        states, outs = b.new_empty(len(passing.goes_on), *b.shape[1:]), b.clone()
        for trip, given, gone in passing.steps:
            if trip:
                states[trip.target] = trip.go(outs[trip.source], "states")
            outs[gone] += a[gone] @ states[given]
        ctx.passing = passing
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, None]:
        a, states = ctx.saved_tensors
        total, grad_b = gradient.clone(), a.new_zeros(len(a), *gradient.shape[1:])
        grad_a = torch.zeros_like(a)
        for trip, given, gone in reversed(ctx.passing.steps):
            total[given] += a[gone].mT @ grad_b[gone]
            grad_a[gone] = grad_b[gone] @ states[given].mT
            if trip:
                grad_b[trip.source] = trip.go(total[trip.target], "states", back=True)
        return None, grad_a, grad_b, None


def _joined(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ascending ranges, of which those that lie end to end become one."""
    cuts = [i for i, (one, two) in enumerate(pairwise(ranges), 1) if one[1] != two[0]]
    bounds = [0, *cuts, len(ranges)] if ranges else []
    return [(ranges[i][0], ranges[j - 1][1]) for i, j in pairwise(bounds)]
