"""Probes of one attention layer on the context-parallel group: who sees whom, and outputs and gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron.certificate.layer_kinds import Kind
from cp_ring.megatron.certificate.microbatch import Scene, Split, scene
from cp_ring.megatron.certificate.oracle import attend, declared_mask
from cp_ring.megatron.certificate.report import Probe

# Largest norm of an error over the norm of the truth: three times what kernels leave that round partial results to the input's
# precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
SINK = 20.0  # the gradient of a sink is a sum over all queries in which much cancels out


@dataclass(frozen=True)
class Subject:
    """A layer under probe: the job's core attention of this kind, its context-parallel group, and what its tensors are."""

    kind: Kind
    layer: Any
    group: Any
    dtype: torch.dtype
    device: torch.device


def probe(subject: Subject, split: Split, seed: int) -> list[Probe]:
    """All probes of one kind, on random tensors drawn from `seed`; every rank of the group calls it."""
    here = scene(subject.kind, subject.group.rank(), subject.group.size(), split)
    here = Scene(here.n, here.positions.to(subject.device), here.spans, here.packed, here.thd, here.edges)
    sink = subject.layer.softmax_offset
    if sink is not None and subject.kind.sink == "learnable":
        draw = torch.Generator().manual_seed(seed + 1 + dist.get_rank() // subject.group.size())
        with torch.no_grad():
            sink.copy_(_same(torch.randn(sink.shape, generator=draw) + 1.0, subject.group))
    return [*_mask_probes(subject, here), *_value_probes(subject, here, seed)]


def _same(x: Tensor, group: Any) -> Tensor:
    """The tensor of the group's first rank, on all of its ranks."""
    if group.size() > 1:
        moved = x.cuda() if dist.get_backend(group) == "nccl" else x.clone()
        dist.broadcast(moved, dist.get_global_rank(group, 0), group=group)
        return moved
    return x


def _local(x: Tensor, here: Scene) -> Tensor:
    """Whole rows [b, n, ...] to this rank's [s, b, ...], or [s, ...] in thd."""
    rows = [x[row].index_select(0, here.positions[row]) for row in range(len(here.spans))]
    return rows[0] if here.thd else torch.stack(rows, 1)


def _call(subject: Subject, here: Scene, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The layer on whole rows [b, n, heads, size], of which this rank takes its own: out [b, s, h, e]."""
    out = subject.layer(*(_local(x, here) for x in (q, k, v)), None, packed_seq_params=here.packed)
    out = out[:, None] if here.thd else out
    return out.unflatten(-1, (subject.kind.heads, -1)).transpose(0, 1)


def _mask_probes(subject: Subject, here: Scene) -> list[Probe]:
    """Moves one token's value, or the gradient of one query's output, and looks which outputs, or gradients of values, move.

    With equal scores everything is linear in values, and each channel of the value heads carries a token of its own: one call
    probes as many tokens as there are channels.
    """
    kind = subject.kind
    tokens = _chosen(here, 4 * kind.groups * kind.e)
    channels = kind.groups * kind.e
    forward, backward = [], []
    for start in range(0, len(tokens), channels):
        picked = tokens[start : start + channels]
        forward.append(_moved_outputs(subject, here, picked))
        backward.append(_moved_gradients(subject, here, picked))
    return [_mask_probe(subject, "mask", forward), _mask_probe(subject, "mask of gradients", backward)]


def _chosen(here: Scene, most: int) -> list[int]:
    """Positions to probe: edges first, then the others evenly, at most `most`."""
    rest = [token for token in range(here.n) if token not in set(here.edges)]
    left = max(0, most - len(here.edges))
    step = max(1, -(-len(rest) // left)) if left else len(rest) or 1
    return sorted([*here.edges[:most], *(rest[::step][:left])])


@dataclass(frozen=True)
class _Wrong:
    """Pairs (row, query, key) on which the layer and the declared mask disagree: how many, the first, and whether it is seen."""

    count: int
    first: tuple[int, int, int] = (0, 0, 0)
    seen: bool = False


def _ones(subject: Subject, here: Scene, heads: int, size: int, picked: list[int], head_of: Callable[[int], int]) -> Tensor:
    """Zeros [b, n, heads, size] with a one for each picked token, in a channel of its own."""
    x = torch.zeros(len(here.spans), here.n, heads, size, dtype=subject.dtype, device=subject.device)
    for number, token in enumerate(picked):
        x[:, token, head_of(number // size), number % size] = 1
    return x


def _equal_scores(subject: Subject, here: Scene) -> tuple[Tensor, Tensor]:
    shape, kind = (len(here.spans), here.n), subject.kind
    options = {"dtype": subject.dtype, "device": subject.device}
    return torch.zeros(*shape, kind.heads, kind.d, **options), torch.zeros(*shape, kind.groups, kind.d, **options)


def _moved_outputs(subject: Subject, here: Scene, picked: list[int]) -> _Wrong:
    kind, shared = subject.kind, subject.kind.heads // subject.kind.groups
    values = _ones(subject, here, kind.groups, kind.e, picked, lambda group: group)
    with torch.no_grad():
        out = _call(subject, here, *_equal_scores(subject, here), values)  # [b, s, h, e]
    seen = out[:, :, ::shared].flatten(2)[..., : len(picked)].abs() > _least(subject, here)
    return _compare(subject, here, seen, picked, of_keys=True)


def _moved_gradients(subject: Subject, here: Scene, picked: list[int]) -> _Wrong:
    kind, shared = subject.kind, subject.kind.heads // subject.kind.groups
    gradient = _ones(subject, here, kind.heads, kind.e, picked, lambda group: group * shared)
    q, k = _equal_scores(subject, here)
    v = torch.zeros_like(k[..., :1]).expand(*k.shape[:3], kind.e).contiguous().requires_grad_()
    with torch.enable_grad():
        out = _call(subject, here, q, k, v)
        mine = torch.stack([gradient[row].index_select(0, here.positions[row]) for row in range(len(here.spans))])
        (dv,) = torch.autograd.grad(out, v, mine)
    moved = torch.stack([dv[row].index_select(0, here.positions[row]) for row in range(len(here.spans))])
    seen = moved.flatten(2)[..., : len(picked)].abs() > _least(subject, here)
    return _compare(subject, here, seen, picked, of_keys=False)


def _least(subject: Subject, here: Scene) -> float:
    """A quarter of the smallest weight that a visible token can have."""
    sink = subject.layer.softmax_offset
    extra = 0.0 if sink is None else float(sink.detach().double().exp().max())
    return 0.25 / (here.n + extra)


def _compare(subject: Subject, here: Scene, seen: Tensor, picked: list[int], of_keys: bool) -> _Wrong:
    """seen [b, s, picked] against the declared mask; picked tokens are keys of this rank's queries, or queries of its keys."""
    others, window = torch.tensor(picked, device=seen.device), subject.kind.probed
    for row, spans in enumerate(here.spans):
        mine = here.positions[row]
        if of_keys:
            allowed = declared_mask(mine, here.n, spans, window)[:, others]
        else:
            allowed = declared_mask(others, here.n, spans, window)[:, mine].T
        wrong = (seen[row] != allowed).nonzero()
        if len(wrong):
            local, other = int(mine[wrong[0, 0]]), picked[int(wrong[0, 1])]
            pair = (local, other) if of_keys else (other, local)
            return _Wrong(len(wrong), (row, *pair), bool(seen[row][tuple(wrong[0])]))
    return _Wrong(0)


def _mask_probe(subject: Subject, name: str, found: list[_Wrong]) -> Probe:
    count = sum(wrong.count for wrong in found)
    where = ""
    if count:
        worst = next(wrong for wrong in found if wrong.count)
        row, query, key = worst.first
        what = "sees" if worst.seen else "does not see"
        declared = "hidden" if worst.seen else "visible"
        where = f"rank {dist.get_rank()}: query {query} {what} key {key} of row {row}, which is declared {declared}"
    return Probe(name, subject.kind.layer_name, subject.kind.mask, float(count), 0.0, where)


def _value_probes(subject: Subject, here: Scene, seed: int) -> list[Probe]:
    """Outputs and gradients of random tensors against float64."""
    kind, draw = subject.kind, torch.Generator().manual_seed(seed)
    rows = len(here.spans)
    shapes = [(kind.heads, kind.d), (kind.groups, kind.d), (kind.groups, kind.e), (kind.heads, kind.e)]
    whole = [torch.randn(rows, here.n, *shape, generator=draw, dtype=torch.float64) for shape in shapes]
    q, k, v, dout = (_same(x, subject.group).to(subject.device, subject.dtype) for x in whole)
    truth = _truth(subject, here, q, k, v, dout)
    found = _of_layer(subject, here, q, k, v, dout)
    return [_value_probe(subject, here, name, found[name], truth[name]) for name in truth]


def _take(x: Tensor, here: Scene) -> Tensor:
    """This rank's tokens of whole rows: [b, n, ...] to [b, s, ...]."""
    return torch.stack([x[row].index_select(0, here.positions[row]) for row in range(len(here.spans))])


def _of_layer(subject: Subject, here: Scene, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Out and gradients of this rank's tokens by name, [b, s, heads, size]; that of a learnable sink [h] is summed over ranks."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    sink = subject.layer.softmax_offset
    learned = sink is not None and sink.requires_grad
    with torch.enable_grad():
        out = _call(subject, here, *leaves)
        wanted = [*leaves, sink] if learned else leaves
        grads = torch.autograd.grad(out, wanted, _take(dout, here), allow_unused=True)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, grads, strict=True)]
    found = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), (_take(x, here) for x in grads[:3]), strict=True))
    if learned:
        total = grads[3].detach().double()
        if subject.group.size() > 1:
            dist.all_reduce(total, group=subject.group)
        found["dsink"] = total
    return found


def _truth(subject: Subject, here: Scene, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """As `_of_layer`, in float64: each rank computes its own queries, and gradients of keys are summed over the group."""
    kind, sink = subject.kind, subject.layer.softmax_offset
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    offset = None if sink is None else sink.detach().double().requires_grad_()
    with torch.enable_grad():
        rows = []
        for row, spans in enumerate(here.spans):
            mine = here.positions[row]
            allowed = declared_mask(mine, here.n, spans, kind.probed)
            rows.append(attend(leaves[0][row, mine], leaves[1][row], leaves[2][row], allowed, kind.scale, offset))
        out = torch.stack(rows)
        wanted = leaves if offset is None else [*leaves, offset]
        grads = list(torch.autograd.grad(out, wanted, _take(dout, here).double()))
    if subject.group.size() > 1:
        for grad in grads:
            dist.all_reduce(grad, group=subject.group)
    found = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), (_take(x, here) for x in grads[:3]), strict=True))
    return found | ({"dsink": grads[3]} if kind.sink == "learnable" else {})


def _value_probe(subject: Subject, here: Scene, name: str, found: Tensor, truth: Tensor) -> Probe:
    difference = found.double() - truth
    size = float(truth.norm()) or 1.0
    error, bound = float(difference.norm()) / size, BOUNDS[subject.dtype] * (SINK if name == "dsink" else 1.0)
    where = f"rank {dist.get_rank()}"
    if found.dim() == 4:
        row, token = divmod(int(difference.abs().amax((2, 3)).nan_to_num(torch.inf).argmax()), found.shape[1])
        role = "key" if name in ("dk", "dv") else "query"
        where += f": worst at {role} {int(here.positions[row, token])} of row {row}"
    return Probe(name, subject.kind.layer_name, subject.kind.mask, error, bound, where)
