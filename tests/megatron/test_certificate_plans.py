"""The certificate proves what ranks run, and not only the tables from which it follows; so does the
maker of plans of packed microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cp_ring import Layout, Mask, Plan, PlanError, PlanSpec
from cp_ring.megatron.certificate.layer_probe import probe_rank_plan
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.data import masks
from cp_ring.plan import plan as plan_module
from cp_ring.plan.plan import rank_plan

CP, N = 4, 64


def probed(plan):
    """What the certificate of rank 1 says of a layer that runs this plan."""
    batch = SimpleNamespace(local=lambda x: x, packed=None)
    layer = SimpleNamespace(plan_of=lambda *_: plan, options=SimpleNamespace(num_slots=2))
    tested = SimpleNamespace(
        batch=batch,
        layer=layer,
        group=SimpleNamespace(rank=lambda: 1),
        zeros=lambda *sizes: torch.zeros(1, 1, *sizes),
        probe=lambda name, error, bound, where: Probe(
            name, "layer 1", "causal", error, bound, where
        ),
    )
    return probe_rank_plan(tested)


def of_another_rank(ring, rank):
    """Rank 1 runs what is right for rank 0."""
    return replace(rank_plan(ring, 0), rank=1) if rank == 1 else rank_plan(ring, rank)


def test_a_rank_that_would_run_another_plan_fails_the_certificate(monkeypatch):
    made = Plan.build(Mask.causal(N), Layout.zigzag(N, CP))
    assert probed(made).passed
    monkeypatch.setattr(plan_module, "rank_plan", of_another_rank)
    spoiled = Plan.build(Mask.causal(N), Layout.zigzag(N, CP))
    spoiled.verify()  # its tables are right
    failed = probed(spoiled)
    assert not failed.passed and "plan of the rank wrong in 1 plans" in failed.rejection()
    assert "rank" in failed.where and "\n" not in failed.where


def test_the_plan_that_a_rank_makes_of_a_packed_microbatch_is_proven(monkeypatch):
    mask, spec, kind = Mask.documents([0, 20, N]), PlanSpec(Layout.zigzag(N, CP)), ("a kind",)
    own = masks._make_plan(mask, spec, CP, 1, kind)
    whole = spec.build(mask, CP)
    assert own.digest == whole.rank_plan(1).digest
    masks._proven.clear()
    monkeypatch.setattr(
        PlanSpec,
        "build_rank_plan",
        lambda self, mask, cp, rank: replace(self.build(mask, cp).rank_plan(0), rank=rank),
    )
    with pytest.raises(PlanError, match="rank"):
        masks._make_plan(mask, spec, CP, 1, kind)
