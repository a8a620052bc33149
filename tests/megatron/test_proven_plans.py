"""Ranks prove what they run, and not only the tables from which it follows."""

from dataclasses import replace

from cp_ring import Layout, Mask, Plan, PlanError, PlanSpec
from cp_ring.megatron.adapter import microbatch_mask
from cp_ring.plan import plan as plan_module
from cp_ring.plan.plan import rank_plan
from tests.rings import refused

CP, N = 4, 64


def of_another_rank(ring, rank):
    """Rank 1 runs what is right for rank 0."""
    return replace(rank_plan(ring, 0), rank=1) if rank == 1 else rank_plan(ring, rank)


def test_a_rank_never_runs_the_plan_of_another_one(monkeypatch):
    monkeypatch.setattr(plan_module, "rank_plan", of_another_rank)
    spoiled = Plan.build(Mask.causal(N), Layout.zigzag(N, CP))
    spoiled.verify()  # its tables are right
    assert "rank" in refused(PlanError, spoiled.proven_part, 1)
    spoiled.proven_part(2)


def test_the_plan_that_a_rank_makes_of_a_packed_microbatch_is_proven(monkeypatch):
    mask, spec, kind = Mask.documents([0, 20, N]), PlanSpec(Layout.zigzag(N, CP)), ("a kind",)
    own = microbatch_mask._make_plan(mask, spec, CP, 1, kind)
    whole = spec.build(mask, CP)
    assert own.digest == whole.rank_plan(1).digest
    microbatch_mask._proven.clear()
    of_another = replace(whole.rank_plan(0), rank=1)
    monkeypatch.setattr(Plan, "proven_part", lambda self, rank: of_another)
    assert "rank" in refused(PlanError, microbatch_mask._make_plan, mask, spec, CP, 1, kind)


def test_what_the_balanced_layout_gains_is_said_once(capsys):
    cp, offsets = 8, [0, 30_000, *range(31_000, 65_000, 1000), 65_536]
    mask = Mask.documents(offsets)
    zigzag, balanced = Layout.zigzag(mask.n, cp), Layout.balanced(mask, cp)
    for kind in ("a kind", "another"):
        microbatch_mask._make_plan(mask, PlanSpec(zigzag), cp, 1, (kind,))
    (line,) = capsys.readouterr().out.splitlines()
    before, after = (Plan.build(mask, layout).time().both for layout in (zigzag, balanced))
    assert f"{before / after:.2f} times as long by the layout zigzag as by --cp-ring-layout" in line
    microbatch_mask._make_plan(mask, PlanSpec(balanced), cp, 1, ("balanced",))
    microbatch_mask._make_plan(
        Mask.documents([0, 20, N]), PlanSpec(Layout.zigzag(N, cp)), cp, 1, ("few",)
    )
    assert not capsys.readouterr().out
