"""What tests of attention share: one call on all ranks of a ring, its truth in float64, and the
line that a wrong call ends in.
"""

from dataclasses import replace

import numpy as np
import torch

from cp_ring import ConfigError, KernelError, PlanError, ring_attention
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import brute_force, dense, error

FLOAT32 = 3e-6
"""Rounding of float32 at the sizes of these tests; a wrong tile or message is off by 0.01 or more."""


def said(call, *args, **named):
    """The one line of cp_ring's error that a call ends in, "" where it runs."""
    try:
        call(*args, **named)
    except (ConfigError, PlanError, KernelError) as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return str(error)
    return ""


def refused(kind, call, *args, **named):
    """What an error of this kind says, in which a call must end."""
    try:
        call(*args, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} of {call}")


def rank_of(group):
    """Of a process group, of a rank of a `LocalRing`, or of no group."""
    if group is None:
        return 0
    return group.rank() if callable(group.rank) else group.rank


def attend_to_shard(group, case, plan, sink=None, rows=None, **options):
    """Runs on a rank: out, dq, dk and dv of its shard, and with a sink its part of that gradient.
    Batch rows that are one stream are cut by the layout `rows` of each.
    """
    q, k, v, dout = ((rows or plan.layout).shard(x, rank_of(group), 1) for x in case)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sink) if x is not None]
    options |= {} if sink is None else {"sink": leaves[3]}
    out = ring_attention(*leaves[:3], group, plan=plan, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def joined(layout, parts, sharded=4):
    """out and gradients of the whole sequence, from the results of all ranks; those behind the
    first `sharded` are parts of sums.
    """
    columns = list(zip(*parts, strict=True))
    whole = [layout.unshard(list(column), 1) for column in columns[:sharded]]
    return whole + [sum(column) for column in columns[sharded:]]


def attend(case, plan, pool=None, **options):
    """out and gradients of the whole sequence, on threads, or on the processes of `pool`."""
    ranks = LocalRing(plan.cp) if pool is None else pool
    size = () if pool is None else (plan.cp,)
    return joined(plan.layout, ranks.run(attend_to_shard, *size, case, plan, **options))


def truth(case, allowed, sink=None):
    """out and gradients in float64; with a `sink` [h], also of it."""
    leaves = [x.detach().double().requires_grad_() for x in (*case[:3], sink) if x is not None]
    out, _ = dense(*leaves[:3], allowed, sink=leaves[3] if sink is not None else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, case.dout.double())]


def off(results, wanted):
    """The largest error of several tensors; NaN if one has NaN."""
    return float(np.max([error(x, y) for x, y in zip(results, wanted, strict=True)]))


def error_of(results, case, mask):
    """The largest error of out and gradients under a mask."""
    return off(results, brute_force(case, mask.dense()))


def same_bits(first, second):
    """Whether two sequences of tensors are equal, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def with_tables(plan, **tables):
    """The plan with other tables."""
    return replace(plan, ring=replace(plan.ring, **tables), _rank_plans={})


def with_backward(plan, back):
    """The plan with the hops of another one in backward."""
    return with_tables(plan, of_backward=back.ring, gradients=plan.ring.gradients[:0])


def assert_right(plan, case):
    """Out and gradients of a plan on a ring of threads are those of one rank, in float64."""
    assert error_of(attend(case, plan), case, plan.mask) < 1e-12
