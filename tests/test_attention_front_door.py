"""ring_attention without a plan, its arguments, and their errors."""

import gc
import re
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cp_ring
from cp_ring import (
    LatentKeys,
    Layout,
    Mask,
    Plan,
    ring_attention,
)
from cp_ring.comm.groups import transport_for
from cp_ring.kernels import work
from cp_ring.plan import plan as maker
from cp_ring.testing.oracle import Case
from tests.loopback import LoopbackTransport
from tests.rank_pool import python
from tests.rings import said, same_bits

N = 64
CU_SEQLENS = [0, 7, 7, 40, N]
UNEVEN = Mask.documents([0, 50, 60, N])


def zigzag(mask, **options):
    return lambda cp: Plan.build(mask, Layout.zigzag(N, cp), **options)


CALLS = {
    "causal": ({"causal": True}, zigzag(Mask.causal(N))),
    "full": ({"layout": "zigzag"}, zigzag(Mask.full(N))),
    "window": ({"causal": True, "window_size": (9, 0)}, zigzag(Mask.causal(N, (9, 0)))),
    "open window": ({"window_size": (9, 5)}, zigzag(Mask.full(N, (9, 5)))),
    "documents": ({"cu_seqlens": CU_SEQLENS, "causal": True}, zigzag(Mask.documents(CU_SEQLENS))),
    "documents as a tensor": (
        {"cu_seqlens": torch.tensor(CU_SEQLENS, dtype=torch.int32)},
        zigzag(Mask.documents(CU_SEQLENS, causal=False)),
    ),
    "mask": ({"mask": Mask.prefix(N, 20)}, zigzag(Mask.prefix(N, 20))),
    "ring": ({"causal": True, "schedule": "ring"}, zigzag(Mask.causal(N), schedule="ring")),
    "gather": ({"causal": True, "schedule": "gather"}, zigzag(Mask.causal(N), schedule="gather")),
    "route": ({"mask": UNEVEN, "route": "ring"}, zigzag(UNEVEN, route="ring")),
    "heads": ({"causal": True, "heads": 2}, zigzag(Mask.causal(N), ulysses=2)),
    "balanced": (
        {"mask": UNEVEN, "layout": "balanced"},
        lambda cp: Plan.build(UNEVEN, Layout.balanced(UNEVEN, cp)),
    ),
}
"""Arguments of a call, and the plan that it makes, by the number of ranks."""


FORMATS = {
    "bshd": lambda x: x,
    "sbhd": lambda x: x.transpose(0, 1),
    "bhsd": lambda x: x.transpose(1, 2).contiguous(),
    "thd": lambda x: x[0],
}
"""Each format as a view of bshd."""


def _both(group, case, plan, options):
    """Out, gradients and lse without a plan in the format of `options`, and with one in bshd."""
    results = []
    there = FORMATS[options["qkv_format"]]
    for view, arguments in ((there, options), (FORMATS["bshd"], {"plan": plan})):
        q, k, v, dout = (view(x) for x in cp_ring.shard(tuple(case), plan, group))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = ring_attention(q, k, v, group, return_lse=True, **arguments)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout), lse.detach()])
    without, (*planned, lse) = results
    return without, [*map(there, planned), lse[0] if there is FORMATS["thd"] else lse]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cp, qkv_format", [(2, "sbhd"), (4, "bshd"), (2, "bhsd"), (2, "thd")])
def test_same_bits_as_with_a_plan(pool, cp, qkv_format, name):
    options, plan_of = CALLS[name]
    options, plan = options | {"qkv_format": qkv_format}, plan_of(cp)
    case = Case.draw(N, b=1 if qkv_format == "thd" else 2, e=12)
    for without, planned in pool.run(_both, cp, case, plan, options):
        assert same_bits(without, planned)


def test_the_gradient_of_packed_tokens_is_a_view():
    """Of out[0] torch would fill another tensor."""
    out = ring_attention(*(torch.randn(16, 2, 8, requires_grad=True),) * 3, qkv_format="thd")
    dout = torch.randn_like(out)
    assert out.grad_fn(dout).data_ptr() == dout.data_ptr()


def test_a_plan_is_made_and_proven_once(monkeypatch):
    made, plain = [], Plan.verify
    monkeypatch.setattr(Plan, "verify", lambda plan, *args: made.append(plan) or plain(plan, *args))
    q, k, v, _ = Case.draw(24)
    for _ in range(2):
        ring_attention(q, k, v, causal=True)
        ring_attention(q, k, v, cu_seqlens=[0, 24], causal=True)  # the same mask
        ring_attention(q, k, v, mask=Mask.causal(24))
        ring_attention(q, k, v, causal=True, heads=np.int64(1), num_slots=np.int64(2))
    assert len(made) == 1
    ring_attention(q, k, v)
    assert len(made) == 2


def test_more_heads_than_tokens_are_pointed_out():
    q = torch.randn(1, 8, 160, 4)
    with pytest.warns(UserWarning, match="160 heads and 8 tokens.*qkv_format='bhsd'"):
        ring_attention(q, q, q)


PLAN = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
BESIDE_A_PLAN = {
    "mask": Mask.causal(16),
    "causal": True,
    "window_size": (3, 0),
    "cu_seqlens": [0, 16],
    "layout": "contiguous",
    "route": "ring",
    "schedule": "ring",
}


LINES = {
    **{f"{name} and plan are both given": {"plan": PLAN, name: value}
       for name, value in BESIDE_A_PLAN.items()},
    **{f"{name} and mask are both given": {"mask": Mask.causal(16), name: BESIDE_A_PLAN[name]}
       for name in ("causal", "window_size", "cu_seqlens")},
    "schedule=3: it must be a name or a list": {"schedule": 3},
    "causal=np.True_: it must be True or False": {"causal": np.True_},
    "schedule is of type ndarray: it must be a name or": {"schedule": np.array([0, 0])},
    "the sequence has 18 tokens, of which rank 0 of 1 holds 18, but q has 16":
        {"mask": Mask.causal(18)},
    "cu_seqlens ends at 9 tokens, of which rank 0 of 1 holds 9, but q has 16":
        {"cu_seqlens": [0, 9]},
    "cu_seqlens must be one list of offsets, not an array of shape [1, 2]":
        {"cu_seqlens": [[0, 16]]},
    "cu_seqlens must end at the 16 tokens":
        {"cu_seqlens": [0, 9], "layout": Layout.zigzag(16, 1)},
    "window side": {"window_size": ([1], 0)},
    "window_size=3: it must be (left, right)": {"window_size": 3},
    "wire='zip': known are plain, int8, fp8, latent": {"wire": "zip"},
    "heads=0: it must be a whole number above 0": {"heads": 0},
    "heads='all': it must be a whole number above 0": {"heads": "all"},
    "it must be a number of seconds above 0, or None": {"timeout": 10**400},
    "layout is of type Mask: it must be a Layout or a name": {"layout": Mask.causal(16)},
    "group is a str, not a ProcessGroup": {"group": "cp"},
    "kernel='warp': unknown; known are auto, transformer_engine": {"kernel": "warp"},
    "num_slots=1: it must be a whole number from 2 to 8": {"num_slots": 1},
    "wire_dtype='int8': it must be 'input', 'float32' or 'bfloat16'": {"wire_dtype": "int8"},
    "qkv_format='hd': it must be bshd, sbhd, bhsd or thd": {"qkv_format": "hd"},
    "qkv_format='thd': q must be a tensor of 3 dimensions, not shape": {"qkv_format": "thd"},
    "timeout=True": {"timeout": True},
    **{f"{name} is of type list: it must be": {name: [name]}
       for name in ("kernel", "wire", "wire_dtype", "route", "layout", "qkv_format")},
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_contradictions_are_one_line_that_names_the_argument(line):
    said_of_call = said(ring_attention, *Case.draw(16)[:3], **LINES[line])
    assert line in said_of_call or re.search(line, said_of_call), said_of_call


def test_python_rejects_what_there_is_not():
    with pytest.raises(TypeError, match=r"^ring_attention\(\) got an unexpected .* 'dropout_p'"):
        ring_attention(*Case.draw(16)[:3], dropout_p=0.0)


def test_values_beside_latents_and_keys_of_a_cache_are_one_line():
    latents = LatentKeys(torch.ones(1, 16, 4), torch.ones(1, 16, 8), torch.ones(48, 4), 2, 8)
    q, k, v, _ = Case.draw(16)
    assert "v is given beside LatentKeys" in said(ring_attention, q, latents, v)
    line = said(ring_attention, q[:, :1], k, v, causal=True)
    assert "without a cache" in line and "q (1, 1, 4, 16), k (1, 16," in line


def test_what_cannot_be_cut_is_named():
    x = torch.ones(1, 16)
    assert "layout is of type list" in said(cp_ring.shard, x, ["zigzag"])
    assert "layout='zigzga': unknown; known are zigzag" in said(cp_ring.shard, x, "zigzga")
    assert "epoch=3: it must be a Tensor" in said(cp_ring.shard, {"tokens": x, "epoch": 3})


def test_a_part_of_another_rank():
    plan = Plan.build(Mask.causal(32), Layout.zigzag(32, 2))
    q, k, v, _ = Case.draw(16)
    line = said(ring_attention, q, k, v, LoopbackTransport(0, 2), plan=plan.rank_plan(1))
    assert "plan is the part of rank 1, but this is rank 0 of the group" in line


def _groups(group, case):
    """The out of a DeviceMesh and of a process group, and what a group of others says."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = (Layout.zigzag(N, 2).shard(x, rank % 2, 1) for x in case[:3])
    outs = [
        ring_attention(q, k, v, which, causal=True)
        for which in (mesh["cp"], mesh["cp"].get_group())
    ]
    cuda = said(transport_for, mesh["cp"].get_group(), torch.device("cuda"))
    return outs, said(ring_attention, q, k, v, dist.new_group([0, 1]), causal=True), cuda


def test_meshes_and_groups(pool):
    backends = "(its backends are cpu:gloo,cuda:gloo): make it with backend nccl"
    for rank, (outs, says, cuda) in enumerate(pool.run(_groups, 4, Case.draw(N))):
        assert torch.equal(*outs)
        assert cuda == f"the context-parallel group moves no tensors of cuda {backends}"
        member = f"group does not contain this process, which is rank {rank} of 4"
        assert says == ("" if rank < 2 else member)


def test_exports_are_found_without_loading_torch():
    """Every exported name exists; importing the package alone, as the command line does, leaves
    torch out.
    """
    for name in cp_ring.__all__:
        assert getattr(cp_ring, name) is not None
    assert set(cp_ring.__all__) <= set(dir(cp_ring))
    assert cp_ring.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cp_ring.nothing  # noqa: B018
    line = "import sys, cp_ring; cp_ring.__version__; cp_ring.PlanError; sys.exit('torch' in sys.modules)"
    assert python("-c", line).returncode == 0


def test_caches_of_plans_are_bounded_and_hold_nothing_else(monkeypatch):
    q, k, v, _ = Case.draw(24)
    monkeypatch.setattr(maker, "MAX_PLANS", 2)
    for width in (3, 4, 5):
        ring_attention(q, k, v, window_size=(width, 0))
    assert len(maker._plans) == 2
    plan = Plan.build(Mask.causal(24, (7, 0)), Layout.zigzag(24, 1))
    x = q.clone().requires_grad_()
    ring_attention(x, k, v, plan=plan).sum().backward()
    dead = weakref.ref(plan.rank_plan(0))
    assert any(part is dead() for part in work._made)
    del plan, x
    gc.collect()
    assert dead() is None, "the work of a plan keeps it alive"
