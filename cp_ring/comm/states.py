"""Passes the states of recurrent layers from rank to rank, where attention would send keys.

The state after a segment of tokens is an affine function of the state before it, A S + B. The pair
[B, A] is the map of the segment. Each rank finds the maps of its segments by the layer's own
kernel: columns of the state do not mix, so one call for the values [v, 0] from the state [0, I]
ends with [B, A]. Its outputs are those from the state 0, and what a state S adds to them is the
outputs of [0, I] times S. Of Mamba-2, A is a number, the decay of a head over the segment. No token
travels, apart from the halo of the convolution. States pass in a chain or a gather
(`cp_ring.plan.exchange.chains`), and their gradients the other way.

Messages travel while a kernel runs: the halo, while the convolution of all tokens does; maps of the
first wave of segments in a gather, while the second one is computed; and the first messages of
either way, while whole documents are.

Shapes: T tokens of this rank, of all batch rows; h heads; k and v, channels of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.comm.state_messages import HaloMessages, StateLinks, StateMessages, Trip
from cp_ring.comm.transport import Transport
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.ranges import Ints, expand, starts_of
from cp_ring.plan.sizes.device_rates import Rates

_BY_VALUE = ("v", "w")  # what has the channels of values
_INERT = -1e4  # a time step whose softplus is 0: the state does not change
_ALIKE = 1.25  # parts whose lengths differ by less are one batch


class StatePassing:
    """What recurrent layers of one rank do with the tokens of `chains`; makes its tensors once.

    rates: by which chain or gather is chosen; by default those that are assumed of the device.
    """

    def __init__(
        self,
        chains: Chains,
        transport: Transport,
        device: torch.device,
        rates: Rates | None = None,
    ):
        self.chains, self._rank, self.device = chains, transport.rank, device
        self._links = StateLinks(chains, transport, device, rates)
        self._tensor, plan = self._links.tensor, self._links.plan
        self._plan, self.segments = plan, len(plan.offsets) - 1
        self.cu_seqlens = self._tensor(plan.offsets).int()
        self._numbers = chains.waves[chains.owner == transport.rank]
        self._waves = [_Wave(self._links, np.flatnonzero(self._numbers == w)) for w in range(3)]
        places = np.concatenate([wave.tokens for wave in self._waves])
        self._places = self._tensor(np.argsort(places))
        self._halo, self._parts = lru_cache(self._make_halo), lru_cache(self._make_parts)

    def _make_halo(self, width: int) -> tuple[Trip, tuple[Tensor, ...]]:
        """The trip of the halo, then of the tokens whose convolution needs it: their places in the
        shard; the order of halo and these tokens, segment after segment; where segments begin in
        it; and where these tokens are in it.
        """
        halo, shard = self.chains.halo(self._rank, width), self._plan.offsets
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

    def _make_parts(self, width: int) -> tuple[list[list[tuple[Tensor, ...]]], Tensor]:
        """For a kernel that convolves and scans batch rows, which take one state and end with one:
        batches of parts of this rank's tokens, and where tokens are among the outputs.

        Groups of batches: parts that begin anew and hand on, those of the first and of the second
        wave that go on and hand on, those that begin anew alone, and those that go on. Of a batch
        [parts]: the place of the first segment in `goes_on` and of the last one in `hands_on`, and
        [parts, width - 1 + tokens]: places in tokens, one token of nothing and halo; and the
        numbers of segments. The outputs are those of the first group and the last two.
        """
        plan, halo = self._plan, self.chains.halo(self._rank, width)
        held = len(halo.own)
        first = np.unique(np.concatenate([[0], plan.goes_on, plan.hands_on + 1]))
        first = first[first < self.segments]
        groups: list[list[Any]] = [[], [], [], [], []]
        for start, end in zip(first, [*first[1:], self.segments], strict=True):
            near = halo.order[halo.offsets[start] : halo.offsets[start + 1]]
            near, tokens = near[near >= held] + 1, np.arange(plan.offsets[start], plan.offsets[end])
            lead = np.pad(near, (width - 1 - len(near), 0), constant_values=held)
            numbers = np.repeat(np.arange(end - start), np.diff(plan.offsets[start : end + 1]))
            entry, last = (
                np.searchsorted(places, segment)
                for places, segment in ((plan.goes_on, start), (plan.hands_on, end - 1))
            )
            part = entry, last, np.append(lead, tokens), np.pad(numbers, (width - 1, 0))
            goes, hands = start in plan.goes_on, end - 1 in plan.hands_on
            if goes and hands:
                groups[1 + self._numbers[end - 1]].append(part)
            groups[4 if goes else 3 - 3 * hands].append(part)
        batches = [list(self._together(parts, held)) for parts in groups]
        index = [batch[2][:, width - 1 :].flatten() for i in (0, 3, 4) for batch in batches[i]]
        tokens_of_outputs = torch.cat(index)
        real = (tokens_of_outputs < held).nonzero()[:, 0]
        return batches, real[tokens_of_outputs[real].argsort()]

    def _together(self, parts: list[Any], nothing: int) -> Iterator[tuple[Tensor, ...]]:
        """Parts of similar lengths as one batch; tokens of nothing make them as long as the longest
        one.
        """
        parts = sorted(parts, key=lambda part: -len(part[2]))
        while parts:
            longest = len(parts[0][2])
            count = sum(len(part[2]) * _ALIKE >= longest for part in parts)
            batch, parts = parts[:count], parts[count:]
            entries, lasts, index, numbers = zip(*batch, strict=True)
            more = [(0, longest - len(x)) for x in index]
            yield (
                self._tensor(np.array(entries)), self._tensor(np.array(lasts)),
                self._tensor(np.stack([np.pad(x, n, constant_values=nothing)
                                       for x, n in zip(index, more, strict=True)])),
                self._tensor(np.stack([np.pad(x, n, "edge")
                                       for x, n in zip(numbers, more, strict=True)])).int(),
            )  # fmt: skip

    def convolve(self, function: Callable[..., Tensor], x: Tensor, width: int) -> Tensor:
        """The causal convolution over `width` tokens of x [1, T, d], by `function(x, cu_seqlens)`,
        which does it for segments without tokens before them.
        """
        trip, (places, order, offsets, own) = self._halo(width)
        if not trip:
            return function(x, self.cu_seqlens)
        halo = HaloMessages(trip, x[0])
        out = function(x, self.cu_seqlens)
        near = halo.arrived()
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
        eye = torch.eye(k, k + v, dtype=dtype, device=self.device).roll(v, 1)
        flight = self._flight((heads, k, v), tensors["v"], dtype)
        waves = []
        for number, wave in enumerate(self._waves):
            out = tensors["v"].new_empty(1, 0, heads, k + v)
            maps = eye.new_empty(0, heads, k, k + v)
            of_wave = {name: wave.take(x) for name, x in tensors.items()} if wave.sizes else {}
            if number == 2:
                rest = function(**of_wave, cu_seqlens=wave.offsets)[0] if of_wave else out[..., :v]
                break
            if of_wave:
                of_wave |= {
                    name: F.pad(of_wave[name], (0, k)) for name in _BY_VALUE if name in of_wave
                }
                out, maps = function(
                    **of_wave, initial_state=eye.repeat(len(wave.sizes), heads, 1, 1),
                    output_final_state=True, cu_seqlens=wave.offsets,
                )  # fmt: skip
            if flight:
                flight.send(number, wave.entries, maps.to(dtype).index_select(0, wave.handing))
            waves.append((wave, out))
        states = flight.states() if flight else eye.new_empty(0, heads, k, v)
        outs = [wave.with_states(out[0], states, v) for wave, out in waves]
        # without a segment that goes on, states stay in the graph: their gradients are messages
        outs.append(states[:0, :, 0].to(rest.dtype))
        return torch.cat([*outs, rest[0]]).index_select(0, self._places)[None]

    def mamba(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, *params: Tensor, **named: Any
    ) -> Tensor:
        """Outputs [1, T, d] of `mamba_split_conv1d_scan_combined` of mamba_ssm, from z, x, B, C and
        dt of the tokens [1, T, ...].

        weight: of the convolution. params: its bias, the bias of dt, and the A of each head.
        """
        (channels, width), heads = weight.shape, len(params[-1])
        z, trip = x.shape[2] - heads - channels, self._halo(width)[0]
        halo = HaloMessages(trip, x[0, :, z:-heads]) if trip else None
        (begin, *handing, alone, going), places = self._parts(width)

        def run(tokens: Tensor, batch: tuple[Tensor, ...], **more: Any) -> Any:
            index, numbers = batch[2:]
            tokens = tokens.index_select(0, index.flatten()).unflatten(0, index.shape)
            return function(tokens, weight, *params, **named | more, seq_idx=numbers)

        dtype = sum_dtype(x.dtype)
        sizes = z // heads, (channels - z) // 2 // named["ngroups"]
        flight = self._flight((heads, 1, sizes[0] * sizes[1]), x, dtype)
        nothing = F.pad(x.new_zeros(1, x.shape[2] - heads), (0, heads), value=_INERT)
        tokens = whole = torch.cat([x[0], nothing])
        decay = self._decay(x[0, :, -heads:].to(dtype), *params[1:])
        begun = [run(tokens, batch, return_final_states=True) for batch in begin]
        outs = [out for out, _ in begun]
        ends = [(batch, end) for batch, (_, end) in zip(begin, begun, strict=True)]
        near = halo.arrived() if halo else x[0, :0]
        if halo:
            near = F.pad(F.pad(near, (z, 0)), (0, heads), value=_INERT)
            whole = torch.cat([tokens, near])
        for number, batches in enumerate(handing):
            if not flight:
                break
            ends += [(b, run(whole, b, return_final_states=True)[1]) for b in batches]
            entries = torch.cat([self._links.hands_on[:0], *(batch[1] for batch, _ in ends)])
            b = torch.cat([decay.new_empty(0, heads, *sizes), *(end.to(dtype) for _, end in ends)])
            a = decay.index_select(0, entries)[..., None, None]
            flight.send(number, entries, torch.cat([b.flatten(2)[:, :, None], a], -1))
            ends = []
        outs += [run(tokens, batch) for batch in alone]
        states = flight.states() if flight else decay.new_empty(0, *sizes)
        states = states.reshape(-1, heads, *sizes)
        for batch in going:
            outs.append(run(whole, batch, initial_states=states.index_select(0, batch[0])))
        flat = [out[:, width - 1 :].flatten(0, 1) for out in outs]
        # in the graph, as in `delta_rule` and `convolve`
        flat += [y[:0].reshape(0, flat[0].shape[1]).to(flat[0].dtype) for y in (states, near)]
        return torch.cat(flat).index_select(0, places)[None]

    def _decay(self, dt: Tensor, bias: Tensor, a: Tensor) -> Tensor:
        """The decay [segments that hand on, h] of the state of each head over these segments."""
        ends = [self._plan.offsets[i : i + 2] for i in self._plan.hands_on]
        return torch.stack([
            dt.new_zeros(len(a)),
            *((F.softplus(dt[start:end] + bias) * a).sum(0) for start, end in ends),
        ])[1:].exp()  # fmt: skip

    def affine(
        self,
        maps: Callable[..., Tensor],
        apply: Callable[..., Tensor],
        *tensors: Tensor,
        state: tuple[int, int, int],
    ) -> Tensor:
        """Outputs of a layer of your own, whose state is an affine function of the one before it,
        of tensors [T, ...], of which the first one has a gradient wherever another rank's has.

        maps: `maps(*tensors, cu_seqlens)` gives [B, A] of each segment, [segments, h, k, v + k],
            for the tokens of some segments that lie end to end.
        apply: `apply(*tensors, states, cu_seqlens)` gives the outputs from the states before the
            segments, [segments, h, k, v].
        state: h, k and v. A state whose elements only decay is h vectors, with k = 1.
        """
        dtype = sum_dtype(tensors[0].dtype)
        heads, k, v = state
        none = tensors[0].new_zeros(0, heads, k, v + k, dtype=dtype)
        states = none.new_zeros(self.segments, heads, k, v)
        if flight := self._flight(state, tensors[0], dtype):
            for number, wave in enumerate(self._waves[:2]):
                of_wave = none
                if len(wave.entries):
                    parts = (wave.take(x[None])[0] for x in tensors)
                    of_wave = maps(*parts, wave.offsets).index_select(0, wave.handing)
                flight.send(number, wave.entries, of_wave)
            states = states.index_copy(0, self._links.goes_on, flight.states())
        return apply(*tensors, states, self.cu_seqlens)

    def _flight(
        self, state: tuple[int, int, int], like: Tensor, dtype: torch.dtype
    ) -> StateMessages | None:
        """None where no state passes."""
        return StateMessages(self._links, state, like, dtype) if self._links else None


class _Wave:
    """Segments of a rank that are computed together; see `Chains.waves`."""

    def __init__(self, links: StateLinks, segments: Ints):
        plan = links.plan
        ends = [plan.offsets[i : i + 2].tolist() for i in segments]
        self.sizes = [end - start for start, end in ends]
        self.tokens = np.concatenate([np.arange(0), *(np.arange(*end) for end in ends)])
        self.offsets = links.tensor(np.append(0, np.cumsum(self.sizes)).astype(np.int32))
        self._ranges = _joined(ends)
        _, handing, entries = np.intersect1d(segments, plan.hands_on, return_indices=True)
        self.handing, self.entries = links.tensor(handing), links.tensor(entries)
        _, places, entries = np.intersect1d(segments, plan.goes_on, return_indices=True)
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
        return torch.cat([out[:0, :, :v], *parts])


def _joined(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Ascending ranges, of which those that lie end to end become one."""
    cuts = [i for i, (one, two) in enumerate(pairwise(ranges), 1) if one[1] != two[0]]
    bounds = [0, *cuts, len(ranges)] if ranges else []
    return [(ranges[i][0], ranges[j - 1][1]) for i, j in pairwise(bounds)]
