"""Calls of ranks that differ in one keyword end in one line on all ranks, or in the right results."""

import inspect
import itertools

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import PlanError
from cp_ring.testing.oracle import Case
from tests.rings import FLOAT32, joined, off, rank_of, truth

N, CP, H = 64, 4, 4
CASE = Case.draw(N, h=H, g=H)
LAYOUT = Layout.zigzag(N, CP)
SINK = torch.zeros(H)

PAIRS = {
    "causal": (False, True),
    "window_size": ((-1, -1), (9, 9)),
    "cu_seqlens": ([0, N], [0, 32, N]),
    "mask": (Mask.full(N), Mask.causal(N)),
    "plan": (Plan.build(Mask.full(N), LAYOUT), Plan.build(Mask.causal(N), LAYOUT)),
    "layout": ("zigzag", "contiguous"),
    "route": ("direct", "ring"),
    "schedule": ("ring", "gather"),
    "heads": (1, 2),
    "softmax_scale": (0.5, 0.25),
    "deterministic": (None, True),
    "kernel": ("auto", "cpu"),
    "num_slots": (2, 3),
    "wire": ("plain", "int8"),
    "wire_dtype": ("input", "bfloat16"),
    "qkv_format": ("bshd", "sbhd"),
    "sink": (None, SINK),
    "timeout": (None, 1800.0),
    "return_lse": (False, True),
}
"""Two values of each keyword of `ring_attention`."""

BASES = {"ring": {"schedule": "ring"}, "heads": {"heads": 2}}
ALONE = {"mask", "plan", "schedule", "heads", "layout", "route"}  # not beside a base's keyword
FRESH = itertools.count(1)


def test_each_keyword_has_a_pair():
    shown = inspect.signature(ring_attention).parameters
    assert {*PAIRS} == {*shown} - {"q", "k", "v", "group"}
    assert shown["schedule"].default == "auto" and shown["num_slots"].default == 2


def attend(group, calls):
    """What ring_attention says on this rank, and its out, dq, dk and dv."""
    rank = rank_of(group)
    call = calls[rank]
    q, k, v, dout = (LAYOUT.shard(x, rank, 1) for x in CASE)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    swapped = call.get("qkv_format") == "sbhd"
    try:
        out = ring_attention(*(x.transpose(0, 1) if swapped else x for x in leaves), group, **call)
    except PlanError as error:
        return str(error), []
    out = out[0] if call.get("return_lse") else out
    out = out.transpose(0, 1) if swapped else out
    return "", [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("keyword", PAIRS)
def test_ranks_that_differ_in_a_keyword_stop_with_one_line_or_are_right(pool, keyword, base):
    scale = 1 / (8 + next(FRESH))  # so that the calls are new to all ranks
    bases = {} if keyword in ALONE else BASES[base]
    calls = [{"softmax_scale": scale} | bases for _ in range(CP)]
    for rank, call in enumerate(calls):
        call[keyword] = PAIRS[keyword][rank == 1]
    lines, results = zip(*pool.run(attend, CP, calls), strict=True)
    assert len({*lines}) == 1, lines
    if lines[0]:
        assert "ranks of the group make different calls" in lines[0] and "\n" not in lines[0]
        return
    scaled = CASE._replace(q=CASE.q * scale * CASE.q.shape[-1] ** 0.5)
    wanted = truth(scaled, np.ones((N, N), bool))
    wanted[1] = wanted[1] * (scale * CASE.q.shape[-1] ** 0.5)
    assert off(joined(LAYOUT, results), wanted) < FLOAT32
