"""PlanSpec and `plan`: one maker and one cache of proven plans; the names that plans and routes had
before.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from cp_ring.plan import Layout, Mask, PlanSpec
from cp_ring.plan import plan as maker
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.plan import plan
from cp_ring.plan.routes import ROUTES, Route, direct
from cp_ring.plan.sizes.device_rates import use
from tests.rings import said

MASK = Mask.documents([0, 9, 40, 64])


def test_equal_arguments_share_one_plan():
    zigzag = Layout.zigzag(64, 4)
    again = Mask.documents([0, 9, 40, 64])
    assert plan(MASK, 4) is plan(again, 4) and plan(MASK, 4, PlanSpec(zigzag)) is plan(
        again, 4, PlanSpec(replace(zigzag, name="x"))
    )
    others = [PlanSpec("contiguous"), PlanSpec(route="ring"), PlanSpec(schedule="gather"), PlanSpec(ulysses=2),
              PlanSpec(slot_shards=1)]  # fmt: skip
    assert len({id(plan(MASK, 4, each)) for each in [PlanSpec(), *others]}) == 6
    with ThreadPoolExecutor(4) as threads:
        assert (
            len(set(map(id, threads.map(lambda _: plan(MASK, 4, PlanSpec(ulysses=4)), range(8)))))
            == 1
        )


def test_a_plan_is_kept_for_one_device():
    """Of which the balanced layout and the number of heads are those of its rates."""
    documents = Mask.documents(np.cumsum([0, *[5000, 1000, 500] * 8]))
    layouts = {}
    for device in ("h100", "a100", "b200"):
        use(device)
        made = plan(documents, 16, PlanSpec("balanced"))
        assert made.layout.digest == Layout.balanced(documents, 16).digest
        assert plan(documents, 16, PlanSpec("balanced")) is made
        layouts[device] = made.layout.digest
    assert len({*layouts.values()}) > 1


def test_another_route_or_layout_of_the_same_name_makes_another_plan(monkeypatch):
    before = plan(MASK, 4)
    monkeypatch.setitem(ROUTES, "direct", Route(direct))
    assert plan(MASK, 4) is not before
    before = plan(MASK, 4)
    monkeypatch.setitem(LAYOUTS, "zigzag", LAYOUTS["contiguous"])
    assert np.array_equal(plan(MASK, 4).layout.owner, np.arange(4)) and plan(MASK, 4) is not before


def test_a_plan_that_is_not_proven_is_not_kept(monkeypatch):
    def lost(need, cp):
        keys, gradients = direct(need, cp)
        return keys[1:], gradients

    monkeypatch.setitem(ROUTES, "lost", Route(lost))
    for _ in range(2):
        assert "rank" in said(plan, MASK, 4, PlanSpec(route="lost"))
    assert not maker._plans


@pytest.mark.parametrize(
    "asked, says",
    [
        (
            PlanSpec("diagonal"),
            "layout='diagonal': unknown; known are zigzag, contiguous, balanced",
        ),
        (PlanSpec(route="pigeon"), "route='pigeon': unknown; known are direct, ring"),
        (PlanSpec(Layout.zigzag(64, 2)), "layout is for 2 ranks, not for 4"),
        (PlanSpec(Layout.zigzag(16, 4)), "the mask is for 64 tokens, the layout for 16"),
        (PlanSpec(ulysses=3), "heads=3: it must divide the 4 context-parallel ranks"),
        (PlanSpec(slot_shards=0), "slot_shards 0: it must be at least 1"),
    ],
)
def test_what_does_not_fit_is_rejected_in_one_line(asked, says):
    assert said(plan, MASK, 4, asked) == says


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_while_a_plan_is_made_makes_plans():
    begun, done = threading.Event(), threading.Event()

    class Slow(PlanSpec):
        def build(self, mask, cp):
            begun.set()
            done.wait()
            return super().build(mask, cp)

    thread = threading.Thread(target=plan, args=(MASK, 4, Slow()))
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits for the other thread
        plan(MASK, 2)
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_plan_is_shown_in_one_line():
    shown = repr(plan(MASK, 4, PlanSpec(ulysses=2)))
    assert "\n" not in shown and len(shown) < 200 and "heads=2" in shown
    assert shown.startswith(f"<Plan of {MASK!r}, Layout.zig")
