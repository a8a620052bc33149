"""shard, unshard and roll: from tensors of a whole sequence to each rank's part, and back."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from cp_ring.comm.agreement import Backward
from cp_ring.comm.flight import Flight, Landing
from cp_ring.comm.groups import ALONE, Group, check_local, transport_of_call
from cp_ring.comm.mover import Mover
from cp_ring.comm.same_batch import check_same_batch
from cp_ring.comm.transport import Transport
from cp_ring.cuts import check_cut, note_cut
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.plan.layout import LAYOUTS, Layout, dimension
from cp_ring.plan.mask import Mask
from cp_ring.plan.moves import Moves
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import digest, integer, offsets
from cp_ring.plan.records import Fact
from cp_ring.plan_cache import length_of
from cp_ring.runtime import RUNTIME


@_disable_dynamo
def shard[Tensors: (Tensor, tuple[Any, ...], list[Any], dict[Any, Any])](
    tensors: Tensors,
    layout: Layout | Plan | str | None = None,
    group: Group = None,
    dim: int = 1,
) -> Tensors:
    """Return this rank's part of whole tensors along `dim`, the dimension of tokens.

        tokens, labels = cp_ring.shard((tokens, labels), None, group)

    Args:
        tensors: a tensor [..., n tokens, ...], or a tuple, list or dict of tensors; None inside
            stays None.
        layout: a `Layout`, a plan, `zigzag` (the default) or `contiguous`.

    Every rank holds the whole tensor and takes its own part, so nothing travels. The gradient of
    the part reaches this rank's whole tensor only, and is zero elsewhere. Ranks compare tensors of
    integers, such as tokens, by a collective in the first calls and then in one call of 16.

    Raises `PlanError` if a tensor and the layout have different numbers of tokens, and on all ranks
    if ranks hold different integers; `ConfigError` if `group` is not a group.
    """
    named = _named(tensors)
    for name, x in named.items():
        check_local(name, x)
    if named:
        transport = transport_of_call(group, next(iter(named.values())).device, layout)
        check_same_batch(transport, named)
    return parts_of(tensors, layout, group, dim)


def parts_of[Tensors: (Tensor, tuple[Any, ...], list[Any], dict[str, Any])](
    tensors: Tensors, layout: Layout | Plan | str | None, group: Group, dim: int
) -> Tensors:
    """Do what `shard` does, but do not compare the tensors of the ranks."""
    if isinstance(tensors, list | tuple):
        parts = [None if x is None else parts_of(x, layout, group, dim) for x in tensors]
        return parts if isinstance(tensors, list) else tuple(parts)
    if isinstance(tensors, dict):
        named = tensors.items()
        return {name: None if x is None else parts_of(x, layout, group, dim) for name, x in named}
    dim, transport = _begin(tensors, dim, group, layout)
    rank, size = (transport.rank, transport.size) if transport else (0, 1)
    cut = _layout(layout, tensors.shape[dim], size)
    if not isinstance(layout, Layout | Plan):
        _check_even(cut, layout or "zigzag")
    part = cut.shard(tensors, rank, dim)
    if size > 1:
        note_cut(transport, cut)
    return part


def _named(tensors: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors inside of `tensors` by name."""
    if isinstance(tensors, dict):
        inside = [(f"{name}.{key}" if name else str(key), x) for key, x in tensors.items()]
    elif isinstance(tensors, list | tuple):
        inside = [(f"{name or 'tensor '}{number}", x) for number, x in enumerate(tensors)]
    else:
        return {} if tensors is None else {name or "the tensor": tensors}
    return {key: x for each, inner in inside for key, x in _named(inner, each).items()}


@_disable_dynamo
def unshard(
    x: Tensor,
    layout: Layout | Plan | str | None = None,
    group: Group = None,
    dim: int = 1,
    *,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return the whole tensor from the parts of all ranks: the inverse of `shard`. Every rank of
    `group` must call it, and gets the whole tensor.

        logits = cp_ring.unshard(logits, None, group)

    Backward is a collective too. It returns this rank's part of the gradient of the mean of all
    ranks' losses, which is the loss itself where all ranks compute the same loss. `reduction="sum"`
    is for ranks that each compute a part of the loss, as in
    `torch.distributed.nn.functional.all_gather`.

    `layout` is as in `shard`. Raises `PlanError` if x is not this rank's part of the layout.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction={reduction!r}: it must be 'mean' or 'sum'")
    dim, transport = _begin(x, dim, group, layout)
    layout = _layout_of_part(layout, x, transport, dim)
    if transport is None:
        return layout.unshard([x], dim)
    begin_backward = _agree(transport, f"unshard ({reduction})", layout, x.movedim(dim, 0))
    share = 1 / transport.size if reduction == "mean" else 1.0
    mover = Mover(Moves.gathered(layout, layout.merged(transport.size)), transport)

    def post_back(gradient: Tensor) -> Landing:
        begin_backward("unshard")
        land = mover.summed_back(gradient, x.shape[dim], "unshard gradients")
        return lambda: [total.mul_(share).to(gradient.dtype) for total in land()]

    flight = Flight(lambda part: mover.moved(part, "unshard"), post_back)
    (whole,) = flight.arrive(flight.depart(x.movedim(dim, 0).contiguous()))
    return whole.movedim(0, dim)


@_disable_dynamo
def roll(
    x: Tensor,
    shift: int,
    layout: Layout | Plan | str | None = None,
    group: Group = None,
    dim: int = 1,
    *,
    cu_seqlens: Sequence[int] | np.ndarray | Tensor | None = None,
    fill: float = 0,
) -> Tensor:
    """Return this rank's part of `torch.roll(whole, shift, dim)`.

        labels = cp_ring.roll(tokens, -1, None, group)  # the next token of each token

    Every rank of `group` must call it. It is differentiable, and only tokens that change ranks
    travel. Without `cu_seqlens` the first tokens follow the last ones, as in `torch.roll`. With
    `cu_seqlens`, the offsets of packed documents in the whole sequence, a token whose source lies
    in another document gets `fill`; `cu_seqlens=[0, n]` fills the end of a single sequence.

    Raises `ConfigError` if the dtype of x cannot hold `fill`.
    """
    (dim, transport), shift = _begin(x, dim, group, layout), integer(shift, "shift")
    layout = _layout_of_part(layout, x, transport, dim)
    rank = transport.rank if transport else 0
    outside, edges = None, np.zeros(0, np.int64)
    _check_fill(fill, x.dtype)
    if cu_seqlens is not None:
        edges = offsets(cu_seqlens, "cu_seqlens", layout.n)
        outside = _other_document(
            layout, rank, max(-layout.n, min(shift, layout.n)), edges.tobytes(), x.is_cuda
        ).to(x.device, non_blocking=True)
    begin_backward = _agree(
        transport,
        "roll",
        layout,
        x.movedim(dim, 0),
        Fact("shift", str(shift if outside is not None else shift % layout.n), str(shift)),
        Fact("cu_seqlens", digest(edges.tobytes()), "None" if outside is None else "given"),
        Fact.of("fill", fill if outside is not None else 0),
    )

    def post(part: Tensor, by: int) -> Landing:
        mover = Mover(Moves.rolled(layout, by % layout.n), transport or ALONE)
        return mover.moved(part, "roll")

    def post_back(gradient: Tensor) -> Landing:
        begin_backward("roll")
        return post(gradient, -shift)

    flight = Flight(lambda part: post(part, shift), post_back)
    (rolled,) = flight.arrive(flight.depart(x.movedim(dim, 0)))
    if outside is not None:
        rolled = rolled.masked_fill(outside.reshape(-1, *[1] * (x.dim() - 1)), fill)
    return rolled.movedim(0, dim)


def _begin(
    x: Tensor, dim: int, group: Group, layout: Layout | Plan | str | None
) -> tuple[int, Transport | None]:
    """Return the checked dimension of tokens, and the transport of the group."""
    check_local("the tensor", x)
    expect("layout", layout, Layout, Plan, str, NoneType)
    return dimension(dim, x), transport_of_call(group, x.device, layout)


def _agree(
    transport: Transport | None, name: str, layout: Layout, x: Tensor, *more: Fact
) -> Backward:
    """Raise `PlanError` on all ranks if they make different calls: other layouts, dtypes, sizes
    [tokens, ...] or other facts. Returns what backward does first.
    """
    agree = getattr(transport, "agree", None)
    if agree is None:
        return lambda place: None
    facts = (
        Fact("layout", layout.digest, repr(layout)),
        Fact.of("call", name),
        Fact.of("dtype", x.dtype),
        Fact.of("size of a token", tuple(x.shape[1:])),
        *more,
    )
    return agree(tuple(fact[:2] for fact in facts), lambda: facts)


@RUNTIME.cache(maxsize=16)
@torch.inference_mode(False)  # backward of a later call saves it
def _other_document(layout: Layout, rank: int, shift: int, edges: bytes, pinned: bool) -> Tensor:
    """Return a boolean for each token of a rank, on the host: True if the source of its rolled
    value is in another document. Documents begin at the int64 `edges`.
    """
    positions, starts = layout.positions(rank), np.frombuffer(edges, np.int64)
    source = np.searchsorted(starts, positions - shift, "right")
    outside = torch.from_numpy(source != np.searchsorted(starts, positions, "right"))
    return outside.pin_memory() if pinned else outside


def _check_fill(fill: float, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if `dtype` cannot hold `fill`; floating-point numbers may be rounded."""
    try:
        held = torch.tensor(fill, dtype=dtype)
        fits = held.dtype.is_floating_point or held.dtype.is_complex or held.item() == fill
    except (RuntimeError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ConfigError(f"fill={fill!r}: a tensor of {dtype} cannot hold it")


@RUNTIME.cache(maxsize=64)
def _zigzag(n: int, cp: int) -> Layout:
    """Return `Layout.zigzag`, made once."""
    return Layout.zigzag(n, cp)


def _layout(layout: Layout | Plan | str | None, n: int, cp: int) -> Layout:
    if layout is None:
        return _zigzag(n, cp)
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ConfigError(f"layout={layout!r}: unknown; known are {', '.join(LAYOUTS)}")
        if LAYOUTS[layout].fixed:
            return LAYOUTS[layout].make(Mask.full(n), cp)
        raise ConfigError(
            f"layout {layout!r} may follow from the mask: make it, as in Layout.balanced(mask, cp)"
            ", and pass it to this function and to ring_attention"
        )
    if isinstance(layout, Plan):
        layout = layout.layout
    if layout.cp != cp:
        raise ConfigError(
            f"layout is for {layout.cp} ranks, but the group has {cp}: pass their process group as "
            "group="
        )
    return layout


def _check_even(layout: Layout, name: str) -> None:
    """Raise `ConfigError` if ranks hold different numbers of tokens: a rank that knows only its own
    number cannot tell the length of the sequence.
    """
    if len({*layout.tokens_per_rank.tolist()}) > 1:
        raise ConfigError(
            f"{layout.n} tokens cannot be cut evenly over {layout.cp} ranks by {name!r}: pad them, "
            f"or pass layout=Layout.{name}({layout.n}, {layout.cp}), here and to ring_attention"
        )


def _layout_of_part(
    layout: Layout | Plan | str | None, x: Tensor, transport: Transport | None, dim: int
) -> Layout:
    """Return the layout whose part on this rank is x. Raises `PlanError` if x has another size."""
    rank, size = (transport.rank, transport.size) if transport else (0, 1)
    n = (
        0
        if isinstance(layout, Layout | Plan)
        else length_of(x.shape[dim], size, layout or "zigzag")
    )
    of_whole = _layout(layout, n, size)
    held = int(of_whole.tokens_per_rank[rank])
    if x.shape[dim] != held:
        raise PlanError(
            f"rank {rank} holds {held} tokens of the layout, but dimension {dim} of the tensor has "
            f"{x.shape[dim]}"
        )
    if size > 1 and not isinstance(layout, Layout | Plan):
        check_cut(transport, of_whole, "this call")
    return of_whole
