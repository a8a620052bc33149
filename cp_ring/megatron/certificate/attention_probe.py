"""Probes of one attention layer over the context-parallel group: its mask, and its outputs and
gradients against float64.

Each kind of layer is probed on a short microbatch completely, and on the job's own sequence length
at a few positions, as far as time and memory allow.

Shapes: s tokens of this rank, n tokens of a batch row, b batch rows, h query and g key/value heads,
d and e head sizes of keys
and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.comm.latent import Latents
from cp_ring.kernels.dropout import keep
from cp_ring.megatron.certificate import latent_probe
from cp_ring.megatron.certificate.layer_kinds import GRAIN, LayerKind
from cp_ring.megatron.certificate.oracle import attend, declared_mask
from cp_ring.megatron.certificate.probe_batch import ProbeBatch, SplitBatch, make_probe_batch
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.dropout import same_key
from cp_ring.plan.sizes.attention_sizes import WIRES

# Largest norm of an error over the norm of the truth: three times what kernels leave that round
# partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
PARAMETERS = ("sink", "weight")  # their gradients are summed over the context-parallel ranks
# of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0
# of the bound in 16 bits: keys, and gradients of latents, are rounded once more
LATENT_FACTOR = 2.0
SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
PASSES = 10  # forward passes that take as long as all probes of one length
MEMORY = 1 << 30  # bytes of a probe on the CPU


Factor = Callable[[int, Tensor, Tensor], Tensor]
"""(batch row, positions of queries [s] and of keys [n]) to the factors of the weights [h, s, n]."""


@dataclass(frozen=True)
class Subject:
    """A layer under probe: the job's core attention of this kind, its context-parallel group, dtype
    and device.
    """

    kind: LayerKind
    layer: Any
    group: Any
    dtype: torch.dtype
    device: torch.device
    split: SplitBatch
    note: str = ""  # appended to the names of its probes

    @property
    def of_latents(self) -> bool:
        """Whether latents travel instead of keys and values."""
        return getattr(self.layer, "tap", None) is not None

    def batch(self) -> ProbeBatch:
        """The microbatch of this rank."""
        return make_probe_batch(
            self.kind, self.group.rank(), self.group.size(), self.split, self.device
        )

    def probe(self, name: str, error: float, bound: float, where: str) -> Probe:
        """The result of a probe of this layer."""
        return Probe(name + self.note, self.kind.layer_name, self.kind.mask, error, bound, where)


def probe_short(subject: Subject, seed: int, values_only: bool = False) -> list[Probe]:
    """All probes on a short microbatch, on random tensors drawn from `seed`; every rank of the
    group calls it.
    """
    batch = subject.batch()
    _draw_sink(subject, seed)
    masks = [] if values_only else _mask_probes(subject, batch, rounds=4)
    return [*masks, *_value_probes(subject, batch, seed)]


def probe_long(subject: Subject, seed: int) -> list[Probe]:
    """As `probe_short`, at a few positions only, so that the references stay small;
    `subject.kind.tokens` may be large.
    """
    batch = subject.batch()
    _draw_sink(subject, seed)
    return [*_mask_probes(subject, batch, rounds=1), *_value_probes(subject, batch, seed, SAMPLED)]


def prepare(subject: Subject, seed: int) -> tuple[ProbeBatch, _Inputs, dict[str, Tensor]]:
    """A short microbatch, random tensors for it, and what the declared layer makes of them."""
    batch = subject.batch()
    _draw_sink(subject, seed)
    inputs = _draw(subject, batch, seed, None)
    return batch, inputs, _reference(subject, batch, inputs, None)


def probe_values(
    subject: Subject, batch: ProbeBatch, inputs: _Inputs, truth: dict[str, Tensor], seed: int
) -> list[Probe]:
    """The layer on what `prepare` made for one like it."""
    _draw_sink(subject, seed)
    found = _of_layer(subject, batch, inputs)
    return [
        _value_probe(subject, batch, name, found[name], truth[name], inputs.sampled)
        for name in truth
    ]


def probe_dropout(subject: Subject, seed: int) -> list[Probe]:
    """The probes of values with attention dropout, whose pairs are found by their positions in the
    batch rows.
    """
    layer = subject.layer
    rank, heads = layer.tp_group.rank(), subject.kind.heads
    numbers = list(range(rank * heads, (rank + 1) * heads))
    with same_key(layer.dropout_number) as key:

        def factor(batch_row: int, queries: Tensor, keys: Tensor) -> Tensor:
            of_query = torch.full_like(queries, batch_row)
            return keep(key, layer.dropout, numbers, of_query[None], queries[None], keys[None])[
                0
            ] / (1 - layer.dropout)

        layer.train()
        try:
            _draw_sink(subject, seed)
            noted = replace(subject, note=f"{subject.note} with dropout")
            return _value_probes(noted, subject.batch(), seed, factor=factor)
        finally:
            layer.eval()


def at_length(subject: Subject, tokens: int) -> Subject:
    """The same layer on batch rows of `tokens` tokens, with its own window."""
    kind = replace(subject.kind, tokens=tokens, probed=subject.kind.window)
    return replace(subject, kind=kind, note=f"{subject.note} at {tokens} tokens")


def longest_in_time(
    subject: Subject, wanted: int, seconds: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """The largest length up to `wanted` that `probe_long` can probe in `seconds` and in memory; all
    ranks of the group agree.

    Doubles the length and measures a forward pass each time, because the time of short ones says
    little.
    """
    unit = 2 * subject.group.size() * GRAIN
    wanted = wanted if subject.kind.mask == "causal" else wanted // unit * unit
    n = subject.kind.tokens
    while n < wanted:
        longer = min(2 * n, wanted)
        predicted = PASSES * _forward_seconds(at_length(subject, n), clock) * (longer / n) ** 2
        too_large = predicted > seconds or _bytes(subject.kind, longer, subject.dtype) > _memory(
            subject.device
        )
        if _on_any_rank(too_large, subject):
            return n
        n = longer
    return n


def _forward_seconds(subject: Subject, clock: Callable[[], float]) -> float:
    """How long a forward pass takes; the better of two, because the first makes the plan."""
    batch, times = subject.batch(), []
    values = _ones(subject, batch, subject.kind.groups, subject.kind.e, [], lambda group: group)
    for _ in range(2):
        start = clock()
        with torch.no_grad():
            # waits for the device
            float(_call(subject, batch, *_equal_scores(subject, batch), values).sum())
        times.append(clock() - start)
    return min(times)


def _bytes(kind: LayerKind, n: int, dtype: torch.dtype) -> int:
    """At most what `probe_long` needs: whole tensors, their float64 copies, and the scores of one
    batch row's sampled queries.
    """
    of_keys = 4 * kind.groups * (kind.d + kind.e) * 8
    of_queries = 2 * kind.heads * (kind.d + kind.e) * dtype.itemsize
    return n * (kind.batch_size * (of_keys + of_queries) + 6 * SAMPLED * kind.heads * 8)


def _memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) // 4 if device.type == "cuda" else MEMORY


def _on_any_rank(condition: bool, subject: Subject) -> bool:
    answer = torch.tensor(
        float(condition), device="cuda" if dist.get_backend(subject.group) == "nccl" else "cpu"
    )
    if subject.group.size() > 1:
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=subject.group)
    return bool(answer)


def _draw_sink(subject: Subject, seed: int) -> None:
    """Gives learnable sinks a value of their own on each group, the same on all its ranks."""
    sink = subject.layer.softmax_offset
    if sink is not None and subject.kind.sink == "learnable":
        draw = torch.Generator().manual_seed(seed + 1 + dist.get_rank() // subject.group.size())
        with torch.no_grad():
            sink.copy_(_of_first_rank(torch.randn(sink.shape, generator=draw) + 1.0, subject.group))


def _of_first_rank(x: Tensor, group: Any) -> Tensor:
    """The tensor of the group's first rank, on all of its ranks."""
    if group.size() > 1:
        moved = x.cuda() if dist.get_backend(group) == "nccl" else x.clone()
        dist.broadcast(moved, dist.get_global_rank(group, 0), group=group)
        return moved
    return x


def _call(
    subject: Subject,
    batch: ProbeBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latents: Latents | None = None,
) -> Tensor:
    """Calls the layer with this rank's tokens of whole batch rows [b, n, heads, size]; returns out
    [b, s, h, e].

    `latents` [b, n, c] are those that keys and values were made from; by default ones that make the
    values.
    """
    if subject.of_latents:
        given = latents or latent_probe.copies(k, v, subject.layer.config.qk_head_dim)
        local = batch.local(given.latent)
        local = local[0] if batch.thd else local.transpose(0, 1)
        subject.layer.tap = latent_probe.GivenLatents(given._replace(latent=local))
    mine = [batch.local(x) for x in (q, k, v)]
    mine = [x[0] if batch.thd else x.transpose(0, 1).contiguous() for x in mine]
    out = subject.layer(*mine, None, packed_seq_params=batch.packed)
    out = out[:, None] if batch.thd else out
    heads: Tensor = out.unflatten(-1, (subject.kind.heads, -1)).transpose(0, 1)
    return heads


def _mask_probes(subject: Subject, batch: ProbeBatch, rounds: int) -> list[Probe]:
    """Changes one token's value, or the gradient of one query's output: which outputs, or gradients
    of values, change?

    With equal scores everything is linear in the values, and each channel of the value heads
    belongs to one token: so one call probes as many tokens as there are channels. `rounds` limits
    the number of calls.
    """
    channels = subject.kind.groups * subject.kind.e
    channels = min(channels, latent_probe.CHANNELS) if subject.of_latents else channels
    tokens = _chosen_tokens(batch, rounds * channels)
    forward, backward = [], []
    for start in range(0, len(tokens), channels):
        picked = tokens[start : start + channels]
        forward.append(_changed_outputs(subject, batch, picked))
        backward.append(_changed_gradients(subject, batch, picked))
    return [
        _mask_probe(subject, "mask", forward),
        _mask_probe(subject, "mask of gradients", backward),
    ]


def _chosen_tokens(batch: ProbeBatch, most: int) -> list[int]:
    """Positions to probe, at most `most`: half of them edges, or all if there are fewer, and others
    evenly between them.
    """
    edges = _evenly(list(batch.edges), max(most // 2, most - batch.n + len(batch.edges)))
    others = _evenly(sorted(set(range(batch.n)) - set(edges)), most - len(edges))
    return sorted([*edges, *others])


def _evenly(values: list[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spread."""
    step = -(-len(values) // most) if most > 0 else len(values) + 1
    return values[::step] if most > 0 else []


@dataclass(frozen=True)
class _WrongPairs:
    """Pairs (batch row, query, key) on which layer and declared mask disagree: how many, the first,
    whether it is seen.
    """

    count: int
    first: tuple[int, int, int] = (0, 0, 0)
    seen: bool = False


def _ones(
    subject: Subject,
    batch: ProbeBatch,
    heads: int,
    size: int,
    picked: list[int],
    head_of: Callable[[int], int],
) -> Tensor:
    """Zeros [b, n, heads, size] with a one for each picked token, in a channel of its own."""
    x = torch.zeros(
        len(batch.spans), batch.n, heads, size, dtype=subject.dtype, device=subject.device
    )
    for number, token in enumerate(picked):
        x[:, token, head_of(number // size), number % size] = 1
    return x


def _equal_scores(subject: Subject, batch: ProbeBatch) -> tuple[Tensor, Tensor]:
    """Zero queries [b, n, h, d] and keys [b, n, g, d]: every visible key has the same weight."""
    kind = subject.kind
    sizes = [(len(batch.spans), batch.n, heads, kind.d) for heads in (kind.heads, kind.groups)]
    q, k = (torch.zeros(size, dtype=subject.dtype, device=subject.device) for size in sizes)
    return q, k


def _changed_outputs(subject: Subject, batch: ProbeBatch, picked: list[int]) -> _WrongPairs:
    kind, shared = subject.kind, subject.kind.heads // subject.kind.groups
    values = _ones(subject, batch, kind.groups, kind.e, picked, lambda group: group)
    with torch.no_grad():
        out = _call(subject, batch, *_equal_scores(subject, batch), values)  # [b, s, h, e]
    seen = out[:, :, ::shared].flatten(2)[..., : len(picked)].abs() > _smallest_weight(
        subject, batch
    )
    return _compare_pairs(subject, batch, seen, picked, of_keys=True)


def _changed_gradients(subject: Subject, batch: ProbeBatch, picked: list[int]) -> _WrongPairs:
    kind, shared = subject.kind, subject.kind.heads // subject.kind.groups
    gradient = _ones(subject, batch, kind.heads, kind.e, picked, lambda group: group * shared)
    q, k = _equal_scores(subject, batch)
    v = torch.zeros_like(k[..., :1]).expand(*k.shape[:3], kind.e).contiguous().requires_grad_()
    with torch.enable_grad():
        out = _call(subject, batch, q, k, v)
        (dv,) = torch.autograd.grad(out, v, batch.local(gradient))
    seen = batch.local(dv).flatten(2)[..., : len(picked)].abs() > _smallest_weight(subject, batch)
    return _compare_pairs(subject, batch, seen, picked, of_keys=False)


def _smallest_weight(subject: Subject, batch: ProbeBatch) -> float:
    """A quarter of the smallest weight that a visible token can have."""
    sink = subject.layer.softmax_offset
    extra = 0.0 if sink is None else float(sink.detach().double().exp().max())
    return 0.25 / (batch.n + extra)


def _compare_pairs(
    subject: Subject, batch: ProbeBatch, seen: Tensor, picked: list[int], of_keys: bool
) -> _WrongPairs:
    """seen [b, s, picked] against the declared mask; `picked` are keys of this rank's queries, or
    queries of its keys.
    """
    others, window = torch.tensor(picked, device=seen.device), subject.kind.probed
    count, first, first_seen = 0, (0, 0, 0), False
    for batch_row, spans in enumerate(batch.spans):
        mine = batch.positions[batch_row]
        allowed = (
            declared_mask(mine, others, spans, window)
            if of_keys
            else declared_mask(others, mine, spans, window).T
        )
        wrong = (seen[batch_row] != allowed).nonzero()
        if len(wrong) and not count:
            local, other = int(mine[wrong[0, 0]]), picked[int(wrong[0, 1])]
            first = (batch_row, local, other) if of_keys else (batch_row, other, local)
            first_seen = bool(seen[batch_row][tuple(wrong[0])])
        count += len(wrong)
    return _WrongPairs(count, first, first_seen)


def _mask_probe(subject: Subject, name: str, found: list[_WrongPairs]) -> Probe:
    count = sum(wrong.count for wrong in found)
    where = ""
    if count:
        worst = next(wrong for wrong in found if wrong.count)
        batch_row, query, key = worst.first
        what = "sees" if worst.seen else "does not see"
        declared = "hidden" if worst.seen else "visible"
        where = (
            f"rank {dist.get_rank()}: query {query} {what} key {key} of batch row {batch_row}, "
            f"which is declared {declared}"
        )
    return subject.probe(name, float(count), 0.0, where)


@dataclass(frozen=True)
class _Inputs:
    """Random tensors of whole batch rows, q [b, n, h, d], dout [b, n, h, e], and what keys and
    values are made from.

    `of_keys` are k [b, n, g, d] and v [b, n, g, e]; where latents travel, latent [b, n, 1, c], rope
    [b, n, 1, r] and weight.

    `sampled` are indices int64 [m] into this rank's tokens, of the queries that are compared and
    have a gradient; the same for every batch row.
    """

    q: Tensor
    of_keys: dict[str, Tensor]
    dout: Tensor
    sampled: Tensor


def _value_probes(
    subject: Subject,
    batch: ProbeBatch,
    seed: int,
    samples: int | None = None,
    factor: Factor | None = None,
) -> list[Probe]:
    """Outputs and gradients of random tensors against float64; with `samples` of that many queries
    of this rank only.
    """
    inputs = _draw(subject, batch, seed, samples)
    truth = _reference(subject, batch, inputs, factor)
    found = _of_layer(subject, batch, inputs)
    return [
        _value_probe(subject, batch, name, found[name], truth[name], inputs.sampled)
        for name in truth
    ]


def _draw(subject: Subject, batch: ProbeBatch, seed: int, samples: int | None) -> _Inputs:
    kind, batch_size, s = subject.kind, len(batch.spans), batch.positions.shape[1]
    # large ones are drawn where they are needed
    on_device = subject.device if samples else torch.device("cpu")
    draw = torch.Generator(on_device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=draw, dtype=torch.float32, device=on_device)
        return _of_first_rank(x.to(subject.dtype), subject.group).to(subject.device)

    def normal(heads: int, size: int) -> Tensor:
        return drawn(batch_size, batch.n, heads, size)

    q = normal(kind.heads, kind.d)
    if subject.of_latents:
        of_keys = latent_probe.draw(subject.layer.config, kind.groups, normal, drawn)
    else:
        of_keys = {"k": normal(kind.groups, kind.d), "v": normal(kind.groups, kind.e)}
    dout = normal(kind.heads, kind.e)
    if samples is None or samples >= s:
        return _Inputs(q, of_keys, dout, torch.arange(s, device=subject.device))
    ends = [0, s // 2 - 1, s // 2, s - 1]  # of the chunks that a rank holds
    sampled = sorted({*ends, *torch.linspace(1, s - 2, samples - len(ends)).long().tolist()})
    index = torch.tensor(sampled, device=subject.device)
    kept = torch.zeros_like(dout)
    for batch_row in range(batch_size):
        here = batch.positions[batch_row][index]
        kept[batch_row, here] = dout[batch_row, here]
    return _Inputs(q, of_keys, kept, index)


def _of_layer(subject: Subject, batch: ProbeBatch, inputs: _Inputs) -> dict[str, Tensor]:
    """What the layer computes, by name: out and dq of the sampled queries [b, m, h, size], dk and
    dv of this rank's keys.

    The gradients of parameters are summed over ranks: `dsink` [h] of a learnable sink, `dweight`
    where latents travel.
    """
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name, x in {"q": inputs.q, **inputs.of_keys}.items()
    }
    sink = subject.layer.softmax_offset
    if sink is not None and sink.requires_grad:
        leaves["sink"] = sink
    with torch.enable_grad():
        k, v = _keys(subject, leaves)
        out = _call(subject, batch, leaves["q"], k, v, _latents(subject, leaves))
        made = torch.autograd.grad(
            out, list(leaves.values()), batch.local(inputs.dout), allow_unused=True
        )
    found = {"out": out.detach()[:, inputs.sampled]}
    for (name, leaf), grad in zip(leaves.items(), made, strict=True):
        gradient = torch.zeros_like(leaf) if grad is None else grad
        if name in PARAMETERS:
            found["d" + name] = _summed(subject, gradient.detach().double())
        else:
            found["d" + name] = (
                batch.local(gradient)[:, inputs.sampled] if name == "q" else batch.local(gradient)
            )
    return found


def _keys(subject: Subject, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of `_Inputs.of_keys`."""
    if not subject.of_latents:
        return tensors["k"], tensors["v"]
    return latent_probe.keys(
        tensors["latent"], tensors["rope"], tensors["weight"], subject.layer.config.qk_head_dim
    )


def _latents(subject: Subject, tensors: dict[str, Tensor]) -> Latents | None:
    if not subject.of_latents:
        return None
    weight, key_dim = tensors["weight"], subject.layer.config.qk_head_dim
    return Latents(tensors["latent"].squeeze(2), weight[:, :key_dim], weight[:, key_dim:])


def _summed(subject: Subject, x: Tensor) -> Tensor:
    """x, summed over the context-parallel ranks, in place."""
    if subject.group.size() > 1:
        dist.all_reduce(x, group=subject.group)
    return x


def _reference(
    subject: Subject, batch: ProbeBatch, inputs: _Inputs, factor: Factor | None
) -> dict[str, Tensor]:
    """As `_of_layer`, in float64: each rank computes its own queries, and gradients of keys are
    summed over the group.
    """
    kind, sink = subject.kind, subject.layer.softmax_offset
    keys = torch.arange(batch.n, device=subject.device)
    found: dict[str, list[Tensor]] = {}
    parameters = {
        name: x.detach().double() for name, x in inputs.of_keys.items() if name in PARAMETERS
    }
    parameters |= {} if sink is None else {"sink": sink.detach().double()}
    totals = {
        "d" + name: torch.zeros_like(x)
        for name, x in parameters.items()
        if name != "sink" or kind.sink == "learnable"
    }
    for batch_row, spans in enumerate(batch.spans):
        mine = batch.positions[batch_row][inputs.sampled]
        allowed = declared_mask(mine, keys, spans, kind.probed)
        of_keys = {
            name: x[batch_row].double()
            for name, x in inputs.of_keys.items()
            if name not in PARAMETERS
        }
        leaves = {"q": inputs.q[batch_row, mine].double(), **of_keys, **parameters}
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        with torch.enable_grad():
            k, v = _keys(
                subject,
                {name: leaves[name][None] if name in of_keys else x for name, x in leaves.items()},
            )
            kept = None if factor is None else factor(batch_row, mine, keys)
            out = attend(leaves["q"], k[0], v[0], allowed, kind.scale, leaves.get("sink"), kept)
            grads = torch.autograd.grad(
                out, list(leaves.values()), inputs.dout[batch_row, mine].double()
            )
        found.setdefault("out", []).append(out.detach())
        for name, grad in zip(leaves, grads, strict=True):
            if name in of_keys:
                found.setdefault("d" + name, []).append(
                    _summed(subject, grad)[batch.positions[batch_row]]
                )
            elif name == "q":
                found.setdefault("dq", []).append(grad)
            elif "d" + name in totals:
                totals["d" + name] += grad
    stacked = {name: torch.stack(values) for name, values in found.items()}
    return stacked | {name: _summed(subject, total) for name, total in totals.items()}


def _value_probe(
    subject: Subject, batch: ProbeBatch, name: str, found: Tensor, truth: Tensor, sampled: Tensor
) -> Probe:
    difference = found.double() - truth
    size = float(truth.norm()) or 1.0
    bound = BOUNDS[subject.dtype] + WIRES[subject.layer.wire].widening
    bound *= (
        SINK_FACTOR
        if name == "dsink"
        else LATENT_FACTOR
        if subject.of_latents and subject.dtype.itemsize == 2
        else 1.0
    )
    where = f"rank {dist.get_rank()}"
    if found.dim() == 4:
        batch_row, token = divmod(
            int(difference.abs().amax((2, 3)).nan_to_num(torch.inf).argmax()), found.shape[1]
        )
        of_keys = name not in ("out", "dq")
        position = batch.positions[batch_row] if of_keys else batch.positions[batch_row][sampled]
        where += (
            f": worst at {'key' if of_keys else 'query'} {int(position[token])} of batch row "
            f"{batch_row}"
        )
    return subject.probe(name, float(difference.norm()) / size, bound, where)
