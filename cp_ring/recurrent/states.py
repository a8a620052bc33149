"""Passes the states of recurrent layers from rank to rank, where attention would send keys.

The state after a segment of tokens is an affine function of the state before it, A S + B. The pair
[B, A] is the map of the segment. Each rank finds the maps of its segments by the layer's own
kernel: columns of the state do not mix, so one call for the values [v, 0] from the state [0, I]
ends with [B, A]. Its outputs are those from the state 0, and what a state S adds to them is the
outputs of [0, I] times S. Of Mamba-2, A is a number, the decay of a head over the segment. No token
travels, apart from the halo of the convolution. Maps travel in one gather
(`cp_ring.recurrent.segments`), and the gradients of the states in another one.

Messages travel while a kernel runs: the halo, while the convolution of all tokens does, and maps,
while the documents are computed that lie on one rank.

Shapes: T tokens of this rank, of all batch rows; h heads; k and v, channels of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.comm.transport import Transport
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.ranges import Ints, expand, starts_of
from cp_ring.recurrent.messages import StateLinks, Trip, halo_flight, state_flight
from cp_ring.recurrent.segments import Segments

_BY_VALUE = ("v", "w")  # what has the channels of values
_INERT = -1e4  # a time step whose softplus is 0: the state does not change
_ALIKE = 1.25  # parts whose lengths differ by less are one batch


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a rank that a kernel of batch rows scans in one row: at most the first
    segment goes on, and at most the last one hands on. Or a batch of parts, with tensors.

    Attributes:
        entry: the place of the first segment in `goes_on`; -1 if it begins anew.
        exit: the place of the last segment in `hands_on`; -1 if it hands nothing on.
        index: places of the tokens, the halo before them: int64 [tokens].
        segment: the number of the segment of each, within the part: int64 [tokens].
    """

    entry: Any
    exit: Any
    index: Any
    segment: Any


@dataclass(frozen=True)
class _Parts:
    """Batches of parts, by what they do with states. places: where the tokens of the rank are among
    the outputs of `ends`, `alone` and `going`.
    """

    ends: list[Part]  # begin anew, and hand on
    through: list[Part]  # go on, and hand on
    alone: list[Part]
    going: list[Part]  # go on, those of `through` among them
    places: Tensor


class StatePassing:
    """What recurrent layers of one rank do with its tokens; makes its tensors once."""

    def __init__(self, segments: Segments, transport: Transport, device: torch.device):
        self.segments, self._rank, self.device = segments, transport.rank, device
        self._links = StateLinks(segments, transport, device)
        self._tensor, held = self._links.tensor, self._links.held
        self._held, count = held, len(held.offsets) - 1
        self.cu_seqlens = self._tensor(held.offsets).int()
        shares = np.isin(np.arange(count), [*held.goes_on, *held.hands_on])
        self._shared, self._whole = (
            _Together(self._links, np.flatnonzero(each)) for each in (shares, ~shares)
        )
        order = np.concatenate([self._shared.tokens, self._whole.tokens])
        self._places = self._tensor(np.argsort(order))
        self._halo, self._parts = lru_cache(self._make_halo), lru_cache(self._make_parts)

    def _make_halo(self, width: int) -> tuple[Trip, tuple[Tensor, ...]]:
        """The trip of the halo, then of the tokens whose convolution needs it: their places in the
        shard; the order of halo and these tokens, segment after segment; where segments begin in
        it; and where these tokens are in it.
        """
        halo, shard = self.segments.halo(self._rank, width), self._held.offsets
        held, sizes = len(halo.own), np.diff(shard)
        far = np.diff(halo.offsets) - sizes
        count = np.where(far > 0, far + np.minimum(sizes, width - 1), 0)
        order = halo.order[expand(halo.offsets[:-1], count)[1]]
        own = np.flatnonzero(order < held)
        places = order[own]
        order = order - held
        order[own] = len(halo.order) - held + np.arange(len(own))
        offsets = np.append(starts_of(count[count > 0]), len(order))
        tensors = map(self._tensor, (places, order, offsets.astype(np.int32), own))
        return self._links.trip(halo.swap), tuple(tensors)

    def _make_parts(self, width: int) -> _Parts:
        """For a kernel that convolves and scans batch rows, which take one state and end with one.

        Indices count tokens, one token of nothing, and halo.
        """
        held, halo = self._held, self.segments.halo(self._rank, width)
        tokens, count = len(halo.own), len(held.offsets) - 1
        entries, exits = ({s: i for i, s in enumerate(x)} for x in (held.goes_on, held.hands_on))
        first = np.unique(np.concatenate([[0], held.goes_on, held.hands_on + 1]))
        first = first[first < count]
        parts = []
        for start, end in zip(first, [*first[1:], count], strict=True):
            near = halo.order[halo.offsets[start] : halo.offsets[start + 1]]
            near = near[near >= tokens] + 1
            lead = np.pad(near, (width - 1 - len(near), 0), constant_values=tokens)
            own = np.arange(held.offsets[start], held.offsets[end])
            numbers = np.repeat(np.arange(end - start), np.diff(held.offsets[start : end + 1]))
            index, segment = np.append(lead, own), np.pad(numbers, (width - 1, 0))
            parts.append(Part(entries.get(start, -1), exits.get(end - 1, -1), index, segment))
        ends, through, alone, going = (
            list(self._together(each, tokens))
            for each in (
                [p for p in parts if p.entry < 0 <= p.exit],
                [p for p in parts if p.entry >= 0 and p.exit >= 0],
                [p for p in parts if p.entry < 0 and p.exit < 0],
                [p for p in parts if p.entry >= 0],
            )
        )
        outputs = [batch.index[:, width - 1 :].flatten() for batch in (*ends, *alone, *going)]
        tokens_of_outputs = torch.cat(outputs)
        real = (tokens_of_outputs < tokens).nonzero()[:, 0]
        places = real[tokens_of_outputs[real].argsort()]
        return _Parts(ends, through, alone, going, places)

    def _together(self, parts: list[Part], nothing: int) -> Iterator[Part]:
        """Parts of similar lengths as one batch; tokens of nothing make them as long as the longest
        one.
        """
        parts = sorted(parts, key=lambda part: -len(part.index))
        while parts:
            longest = len(parts[0].index)
            count = sum(len(part.index) * _ALIKE >= longest for part in parts)
            batch, parts = parts[:count], parts[count:]
            more = [(0, longest - len(part.index)) for part in batch]
            index = [
                np.pad(part.index, pad, constant_values=nothing)
                for part, pad in zip(batch, more, strict=True)
            ]
            segment = [
                np.pad(part.segment, pad, "edge") for part, pad in zip(batch, more, strict=True)
            ]
            yield Part(
                entry=self._tensor(np.array([part.entry for part in batch])),
                exit=self._tensor(np.array([part.exit for part in batch])),
                index=self._tensor(np.stack(index)),
                segment=self._tensor(np.stack(segment)).int(),
            )

    def convolve(self, function: Callable[..., Tensor], x: Tensor, width: int) -> Tensor:
        """The causal convolution over `width` tokens of x [1, T, d], by `function(x, cu_seqlens)`,
        which does it for segments without tokens before them.
        """
        trip, (places, order, offsets, own) = self._halo(width)
        if not trip:
            return function(x, self.cu_seqlens)
        flight = halo_flight(trip)
        link = flight.depart(x[0])
        out = function(x, self.cu_seqlens)
        (near,) = flight.arrive(link)
        head = torch.cat([near, x[0].index_select(0, places)]).index_select(0, order)
        # without tokens that need it, the halo stays in the graph: its gradients are those of sends
        fixed = function(head[None], offsets)[0].index_select(0, own) if len(order) else near
        return out[0].index_copy(0, places, fixed.to(out.dtype))[None]

    def delta_rule(self, function: Callable[..., Any], **tensors: Tensor) -> Tensor:
        """Outputs [1, T, h, v] of a gated delta rule of fla, from tensors [1, T, h, ...]: q, k, v
        and gates.
        """
        k, v = (tensors[name].shape[-1] for name in "kv")
        heads, dtype = tensors["v"].shape[2], sum_dtype(tensors["v"].dtype)
        shared, whole, outs = self._shared, self._whole, []
        if shared.sizes:
            padded = {name: shared.take(x) for name, x in tensors.items()}
            padded |= {name: F.pad(padded[name], (0, k)) for name in _BY_VALUE if name in padded}
            eye = torch.eye(k, k + v, dtype=dtype, device=self.device).roll(v, 1)
            out, maps = function(
                **padded, initial_state=eye.repeat(len(shared.sizes), heads, 1, 1),
                output_final_state=True, cu_seqlens=shared.offsets,
            )  # fmt: skip
            flight = state_flight(self._links, v)
            link = flight.depart(maps.to(dtype).index_select(0, shared.handing))
        if whole.sizes:
            of_whole = {name: whole.take(x) for name, x in tensors.items()}
            outs.append(function(**of_whole, cu_seqlens=whole.offsets)[0][0])
        if shared.sizes:
            (states,) = flight.arrive(link)
            outs.insert(0, shared.with_states(out[0], states, v))
            # without a segment that goes on, states stay in the graph: their gradients are messages
            outs.append(states[:0, :, 0].to(out.dtype))
        return torch.cat(outs).index_select(0, self._places)[None]

    def mamba(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, *params: Tensor, **named: Any
    ) -> Tensor:
        """Outputs [1, T, d] of `mamba_split_conv1d_scan_combined` of mamba_ssm, from z, x, B, C and
        dt of the tokens [1, T, ...].

        weight: of the convolution. params: its bias, the bias of dt, and the A of each head.
        """
        (channels, width), heads = weight.shape, len(params[-1])
        z, trip, parts = x.shape[2] - heads - channels, self._halo(width)[0], self._parts(width)
        dtype = sum_dtype(x.dtype)
        sizes = z // heads, (channels - z) // 2 // named["ngroups"]
        if trip:
            halo = halo_flight(trip)
            halo_link = halo.depart(x[0, :, z:-heads])

        def run(tokens: Tensor, batch: Part, **more: Any) -> Any:
            tokens = tokens.index_select(0, batch.index.flatten()).unflatten(0, batch.index.shape)
            return function(tokens, weight, *params, **named | more, seq_idx=batch.segment)

        nothing = F.pad(x.new_zeros(1, x.shape[2] - heads), (0, heads), value=_INERT)
        tokens = whole = torch.cat([x[0], nothing])
        begun = [run(tokens, batch, return_final_states=True) for batch in parts.ends]
        outs, kept = [out for out, _ in begun], []  # and what only stays in the graph
        if trip:
            (near,) = halo.arrive(halo_link)
            kept.append(near)
            near = F.pad(F.pad(near, (z, 0)), (0, heads), value=_INERT)
            whole = torch.cat([tokens, near])
        if self._links:
            ends = [end for _, end in begun]
            ends += [run(whole, batch, return_final_states=True)[1] for batch in parts.through]
            exits = [batch.exit for batch in (*parts.ends, *parts.through)]
            order = torch.cat([self._links.hands_on[:0], *exits]).argsort()
            b = torch.cat(
                [x.new_empty(0, heads, *sizes, dtype=dtype), *(e.to(dtype) for e in ends)]
            )
            a = self._decay(x[0, :, -heads:].to(dtype), *params[1:])[..., None, None]
            maps = torch.cat([b.index_select(0, order).flatten(2)[:, :, None], a], -1)
            flight = state_flight(self._links, sizes[0] * sizes[1])
            link = flight.depart(maps, x)
        outs += [run(tokens, batch) for batch in parts.alone]
        if self._links:
            states = flight.arrive(link)[0].reshape(-1, heads, *sizes)
            kept.append(states)
            for batch in parts.going:
                outs.append(run(whole, batch, initial_states=states.index_select(0, batch.entry)))
        flat = [out[:, width - 1 :].flatten(0, 1) for out in outs]
        flat += [y[:0].reshape(0, flat[0].shape[1]).to(flat[0].dtype) for y in kept]
        return torch.cat(flat).index_select(0, parts.places)[None]

    def _decay(self, dt: Tensor, bias: Tensor, a: Tensor) -> Tensor:
        """The decay [segments that hand on, h] of the state of each head over these segments."""
        ends = [self._held.offsets[i : i + 2] for i in self._held.hands_on]
        return torch.stack([
            dt.new_zeros(len(a)),
            *((F.softplus(dt[start:end] + bias) * a).sum(0) for start, end in ends),
        ])[1:].exp()  # fmt: skip


class _Together:
    """Segments of a rank that are computed in one call."""

    def __init__(self, links: StateLinks, segments: Ints):
        held = links.held
        ends = [held.offsets[i : i + 2].tolist() for i in segments]
        self.sizes = [end - start for start, end in ends]
        self.tokens = np.concatenate([np.arange(0), *(np.arange(*end) for end in ends)])
        self.offsets = links.tensor(np.append(0, np.cumsum(self.sizes)).astype(np.int32))
        self._ranges = _joined(ends)
        self.handing = links.tensor(np.flatnonzero(np.isin(segments, held.hands_on)))
        _, places, entries = np.intersect1d(segments, held.goes_on, return_indices=True)
        self._goes = dict(zip(places.tolist(), entries.tolist(), strict=True))

    def take(self, x: Tensor) -> Tensor:
        """The tokens of the segments, of x [1, T, ...]."""
        parts = [x[:, start:end] for start, end in self._ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def with_states(self, out: Tensor, states: Tensor, v: int) -> Tensor:
        """Outputs [tokens, h, v] from those of the state 0, which those of the state I follow."""
        parts = list(out.split(self.sizes))
        for place, part in enumerate(parts):
            parts[place] = part[..., :v]
            if place in self._goes:
                more = part[..., v:].to(states.dtype).transpose(0, 1) @ states[self._goes[place]]
                parts[place] = (parts[place] + more.transpose(0, 1)).to(out.dtype)
        return torch.cat(parts)


def _joined(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ascending ranges, of which those that lie end to end become one."""
    cuts = [i for i, (one, two) in enumerate(pairwise(ranges), 1) if one[1] != two[0]]
    bounds = [0, *cuts, len(ranges)] if ranges else []
    return [(ranges[i][0], ranges[j - 1][1]) for i, j in pairwise(bounds)]
