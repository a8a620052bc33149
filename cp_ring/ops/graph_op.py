"""`ring_attention` as one operator of torch's, `cp_ring::attention`, so that `torch.compile` leaves
it whole in a graph (`fullgraph=True`), and policies of selective checkpointing can name it.

A graph holds tensors and numbers. So a call in it has a number for what does not change from step
to step (`number_of`), and `Numbered` objects, tuples of numbers and the seed of dropout come as a
list of numbers: a mask, a plan or a `cu_seqlens` of another step is no reason to compile again.

What is planned and sent is that of the call without a graph. Backward of a plan that exchanges
heads, or of batch rows with masks of their own, computes forward once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.ops.dtypes import sum_dtype
from cp_ring.runtime import RUNTIME, Numbered

# the group is a process group or None; what it makes are an `Attention` and its inputs
Resolve = Callable[..., tuple[Any, Any]]
_Static = tuple[tuple[str, Any], ...]

_SEED = "dropout_seed"
_NUMBERS = str | int | float | tuple | Numbered
_calls: list[tuple[Any, _Static, Resolve]] = RUNTIME.of_process([])


def supports(q: Tensor, k: Any, v: Any, group: Any, options: Mapping[str, Any]) -> bool:
    """Whether the call can be an operator: without latents, numbers in tensors, casts of autocast,
    and transports of tests.
    """
    return (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.dtype == k.dtype == v.dtype
        and (group is None or isinstance(group, dist.ProcessGroup))
        and all(
            value is None or name == "sink" or isinstance(value, _NUMBERS)
            for name, value in options.items()
        )
    )


def call(
    resolve: Resolve, tensors: tuple[Any, ...], group: Any, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Out and lse of `ring_attention`, while torch traces it. `resolve` makes an `Attention` and
    its inputs of the arguments of `ring_attention`.
    """
    numbers = [options.get(_SEED) or 0]
    static: list[tuple[str, Any]] = []
    for name, value in options.items():
        if isinstance(value, Numbered):
            static.append((name, ("numbered", len(numbers))))
            numbers.append(value.number)
        elif isinstance(value, tuple) and all(isinstance(each, int) for each in value):
            static.append((name, ("tuple", len(numbers), len(value))))
            numbers.extend(value)
        elif name == _SEED and value is not None:
            static.append((name, 0))  # that of a step is the first number
        elif name != "sink":
            static.append((name, value))
    named = group.group_name if isinstance(group, dist.ProcessGroup) else None
    number = number_of(named, tuple(static), resolve)
    return attention(*tensors, options.get("sink"), number, numbers)


def number_of(group: Any, static: _Static, resolve: Resolve) -> int:
    """The place of these arguments among those of all calls. group: its name."""
    arguments = group, static, resolve
    if arguments not in _calls:
        _calls.append(arguments)
    return _calls.index(arguments)


number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, number: int, numbers: Sequence[int]
) -> tuple[Any, Any]:
    name, static, resolve = _calls[number]
    group = None if name is None else dist.distributed_c10d._resolve_process_group(name)
    options = {name: _value(value, numbers) for name, value in static}
    options |= {_SEED: numbers[0]} if options.get(_SEED) is not None else {}
    return resolve(q, k, v, group, True, options | {"sink": sink})


def _value(value: Any, numbers: Sequence[int]) -> Any:
    kind, first, count = (*value, None, None)[:3] if isinstance(value, tuple) else (None,) * 3
    if kind == "tuple":
        return tuple(numbers[first : first + count])
    return Numbered.of(numbers[first]) if kind == "numbered" else value


@torch.library.custom_op("cp_ring::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, number: int, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Out and lse. number: of the call. numbers: the seed of dropout, and those of its objects."""
    attend, inputs = _attention(q, k, v, sink, number, numbers)
    out, lse, *_ = attend(inputs)
    assert lse is not None, "an lse that was asked for is missing"
    return _dense(out, number), lse.contiguous()


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, number: int, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    batch, tokens = out.shape[:2] if _batch_first(number) else (out.shape[1], out.shape[0])
    lse = q.new_empty((batch, q.shape[2], tokens), dtype=sum_dtype(q.dtype))
    return _dense(out, number), lse


@torch.library.custom_op("cp_ring::attention_backward", mutates_args=())
def _gradients(
    grads: Sequence[Tensor | None], saved: Sequence[Tensor], number: int, numbers: Sequence[int]
) -> list[Tensor]:
    """The gradients of q, k, v, and of the sink if there is one. saved: these, out and lse."""
    *tensors, out, lse = saved
    with _above_autograd(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        q, k, v, *sink = leaves
        attend, inputs = _attention(q, k, v, sink[0] if sink else None, number, numbers)
        results = attend(inputs, attend.kept(out, lse))[:2]
        pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None]
        outputs, of_outputs = zip(*pairs, strict=True)
        of_leaves = torch.autograd.grad(outputs, leaves, of_outputs)
    return [_dense(x, number) for x in of_leaves]


@_gradients.register_fake
def _(
    grads: Sequence[Tensor | None], saved: Sequence[Tensor], number: int, numbers: Sequence[int]
) -> list[Tensor]:
    return [_dense(x.new_empty(x.shape), number) for x in saved[:-2]]


def _above_autograd() -> Any:
    """A block in which torch records what is computed, which it does not within an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set() & torch._C._after_autograd_keyset
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _batch_first(number: int) -> bool:
    return ("qkv_format", "sbhd") not in _calls[number][1]


def _dense(x: Tensor, number: int) -> Tensor:
    """`x` with its tokens first in memory, as the ring makes it."""
    if x.dim() == 4 and _batch_first(number):
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.number, ctx.numbers = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = [x for x in ctx.saved_tensors if x is not None]
    gradients = _gradients(grads, saved, ctx.number, ctx.numbers)
    return *(*gradients, None)[:4], None, None


attention.register_autograd(_backward, setup_context=_save)
