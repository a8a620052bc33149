"""Softcap, as in Gemma 2: against dense scores in float64, with windows and sinks, however the call
is split.
"""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.rings import attend, off, truth

N, CAP = 60, 1.5
WINDOW, DOCUMENTS = Mask.causal(N, window=(17, 0)), Mask.documents([0, 7, 30, N])
PLANS = {
    "cp 1": Plan.build(WINDOW, Layout.contiguous(N, 1)),
    "cp 2": Plan.build(WINDOW, Layout.zigzag(N, 2)),
    "cp 3, documents": Plan.build(DOCUMENTS, Layout.balanced(DOCUMENTS, 3)),
    "cp 4": Plan.build(WINDOW, Layout.zigzag(N, 4)),
    "cp 4, heads": Plan.build(WINDOW, Layout.zigzag(N, 4), ulysses=2),
}
SLOPES = [0.5, 0.25, 0.125, 0.0]


@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_are_those_of_dense_scores(name):
    """With sinks; and with ALiBi, which is added to the capped scores."""
    plan, case = PLANS[name], Case.draw(N, b=2, h=4, g=2, d=8, e=12)
    case = case._replace(q=3 * case.q)  # scores beyond the cap
    sink, position = torch.tensor([-1.0, 0.0, 0.5, 3.0]), torch.arange(N)
    bias = -torch.tensor(SLOPES).double()[:, None, None] * (position[:, None] - position).abs()
    for options, more in (({}, {}), ({"alibi_slopes": SLOPES}, {"bias": bias})):
        wanted = truth(case, plan.mask.dense(), sink, softcap=CAP, **more)
        for kernel, dtype, bound in (
            ("reference", torch.float64, 1e-14),
            ("cpu", torch.float32, 1e-6),
        ):
            typed = [x.to(dtype) for x in (*case, sink)]
            results = attend(
                Case(*typed[:4]), plan, sink=typed[4], kernel=kernel, softcap=CAP, **options
            )
            assert off(results, wanted) < bound, kernel


def test_dropped_weights_are_those_without_softcap():
    """A cap that no score comes near changes nothing."""
    case, options = Case.draw(N, h=4), {"dropout_p": 0.3, "dropout_seed": 7}
    with_cap = attend(case, PLANS["cp 2"], softcap=1e4, **options)
    assert off(with_cap, attend(case, PLANS["cp 2"], **options)) < 1e-6


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"softcap": -1.0}, ConfigError, r"softcap=-1\.0: it must be a finite number above 0"),
        ({"softcap": float("nan")}, ConfigError, "softcap=nan: it must be a finite number"),
        ({"kernel": "flash_aten"}, KernelError, "has no softcap|runs on CUDA"),
        ({"kernel": "cudnn"}, KernelError, "has no softcap|runs on CUDA"),
    ],
)
def test_what_cannot_be_is_rejected_in_one_line(options, kind, says):
    with pytest.raises(kind, match=says):
        ring_attention(*Case.draw(8)[:3], **{"softcap": CAP} | options)


def test_ranks_with_different_caps_are_rejected():
    with pytest.raises(PlanError, match=r"softcap is 1\.0 on rank 0 and 2\.0 on rank 1"):
        LocalRing(2).run(
            lambda group: ring_attention(*Case.draw(8)[:3], group, softcap=group.rank + 1.0)
        )
