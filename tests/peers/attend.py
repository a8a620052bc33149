"""One case: what other libraries' tests ask of attention, `ring_attention` on threads, and brute
force in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_ring import Layout, Mask, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import dense, error
from tests.rings import rank_of

LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the error of out and of gradients; a wrong tile is off by 0.1 or more."""

_RINGS = {}


@dataclass(frozen=True, eq=False)
class Case:
    """tokens: of queries and of keys. heads: of queries and of keys. sizes: of keys and of values.
    allowed: bool [b or 1, h or 1, queries, keys]. call: keywords of `ring_attention`; a function
    among them is called. split: the layout.
    sinks: their shape, [sinks, h] or [queries, sinks, h]. rejected: the words of the line that says
    why there is no such call. table: what the other library's table says.
    """

    name: str
    cp: int
    tokens: tuple
    heads: tuple
    sizes: tuple
    allowed: np.ndarray
    call: Mapping = field(default_factory=dict)
    batch: int = 1
    split: tuple = ("zigzag",)
    dtype: torch.dtype = torch.float32
    sinks: tuple = ()
    way: str = "threads"
    rejected: str = ""
    table: Mapping = field(default_factory=dict)

    def __post_init__(self):
        if self.tokens[0] != self.tokens[1]:
            object.__setattr__(self, "rejected", "unexpected keyword argument 'key_layout'")


def run(case, processes=None):
    """The largest error divided by its limit; and the line of a rejection. Compiled calls and
    DTensors need processes.
    """
    generator = torch.Generator().manual_seed(len(case.name))
    (n, keys), (h, g), (d, e), b = case.tokens, case.heads, case.sizes, case.batch
    shapes = (b, n, h, d), (b, keys, g, d), (b, keys, g, e), (b, n, h, e), case.sinks
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        if shape
        else None
        for shape in shapes
    ]
    call = {name: x() if callable(x) else x for name, x in case.call.items()}
    layout = _layout(case, call)
    given = replace(case, call={}), call, layout, tensors
    if case.way == "threads":
        parts = _RINGS.setdefault(case.cp, LocalRing(case.cp)).run(_told, *given)
    else:
        assert processes is not None, f"{case.name} needs processes"
        parts = processes.run(_told, case.cp, *given)
    if isinstance(parts[0], str):
        return math.inf, parts[0]
    *found, dsinks = zip(*parts, strict=True)
    whole = [*(_whole(layout, column) for column in found), sum(dsinks)]
    wanted = _truth(case, call, tensors)
    return max(error(x, y) for x, y in zip(whole, wanted, strict=True)) / LIMITS[case.dtype], ""


def _layout(case, call):
    name, n = case.split[0], case.tokens[0]
    if n != case.tokens[1]:
        return "contiguous"  # of cross attention, which is rejected
    if isinstance(name, list):
        return Layout(n, case.cp, np.cumsum([0, *name]), np.arange(case.cp))
    if name == "stripes":
        return Layout(n, case.cp, np.arange(n + 1), np.arange(n) % case.cp, "stripes")
    if name == "balanced":
        mask = call["mask"]
        several = [(mask, 1)] if isinstance(mask, Mask) else [(m, c) for c, m in mask]
        return Layout.balanced(several, case.cp)
    if isinstance(name, tuple) and isinstance(name[0], Layout):
        return name  # of each batch row
    if isinstance(name, tuple):
        return Layout.per_document_zigzag(list(name), case.cp)
    return getattr(Layout, name)(n, case.cp)


def _part(layout, x, rank, dim=1):
    if isinstance(layout, tuple):
        return torch.stack([of.shard(y, rank, dim - 1) for of, y in zip(layout, x, strict=True)])
    return x.clone() if isinstance(layout, str) else layout.shard(x, rank, dim)


def _whole(layout, parts):
    if isinstance(layout, tuple):
        each = zip(layout, *parts, strict=True)
        return torch.stack([of.unshard(mine, 0) for of, *mine in each])
    return layout.unshard(list(parts), 1)


def _told(*given):
    """What a rank finds, or the line of a rejection: an error would end the processes."""
    try:
        return _on_rank(*given)
    except (ConfigError, PlanError, KernelError, TypeError) as rejection:
        return str(rejection)


def _on_rank(group, case, call, layout, tensors):
    rank = rank_of(group)
    *inputs, dout, sinks = tensors
    sinks = torch.empty(0) if sinks is None else sinks.clone()
    leaves = [*(_part(layout, x, rank) for x in inputs), sinks]
    leaves = [x.requires_grad_() for x in leaves]
    form, call = call.get("qkv_format", "bshd"), dict(call)
    q, k, v = (_to(form, x) for x in leaves[:3])
    if case.sinks and sinks.dim() == 2:
        call["sink"] = sinks.logsumexp(0)
    call.setdefault("layout", layout)
    if case.tokens[0] != case.tokens[1]:
        call["key_layout"] = layout
    attend = partial(ring_attention, return_lse=True)
    if case.way == "graph":
        # Cases are many kinds of one function.
        torch._dynamo.reset()
        attend = torch.compile(_attend, backend="eager")
    if case.way == "DTensor":
        mesh = DeviceMesh.from_group(group, "cpu")
        q, k, v = (DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v))
    out, lse = attend(q, k, v, group, **call)
    out, lse = _to(form, out), lse[None] if form == "thd" else lse
    if case.sinks and sinks.dim() == 3:  # of a query of its own: one more merge
        own = _part(layout, sinks, rank, 0).logsumexp(1)
        out = out * torch.sigmoid(lse.transpose(1, 2) - own)[..., None].to(out.dtype)
    return _results(out, leaves, _part(layout, dout, rank))


def _attend(q, k, v, group, **call):
    return ring_attention(q, k, v, group, return_lse=True, **call)


def _to(form, x):
    """From [b, s, h, d] to a format, and back."""
    return {
        "bshd": lambda: x,
        "sbhd": lambda: x.transpose(0, 1),
        "bhsd": lambda: x.transpose(1, 2),
        "thd": lambda: x[0] if x.dim() == 4 else x[None],
    }[form]()


def _truth(case, call, tensors):
    """Out and gradients in float64; several sinks of a head are one."""
    *inputs, dout, sinks = (None if x is None else x.double().requires_grad_() for x in tensors)
    sink = None if sinks is None else sinks.logsumexp(-2)
    out, _ = dense(*inputs, case.allowed, call.get("softmax_scale"), sink)
    return _results(out, [*inputs, torch.empty(0) if sinks is None else sinks], dout)


def _results(out, leaves, dout):
    """out and the gradients of q, k, v and sinks, 0 where there are none."""
    used = [x for x in leaves if x.numel()]
    grads = [*torch.autograd.grad(out, used, dout), torch.zeros(1)]
    return [out.detach(), *grads[: len(leaves)]]
