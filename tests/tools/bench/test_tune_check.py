"""`cp-ring tune --check`: the prediction that it makes, and the comparison."""

import pytest

from cp_ring.tools.bench import tune_check
from cp_ring.tools.bench.tune_check import (
    SmallModel,
    checked_shapes,
    judge,
    predict_attention,
    rank_correlation,
)

SMALL = SmallModel(tokens=256, layers=1, heads=4, head_dim=16, ffn=64)
SPEEDS = {"flops": 1e11, "products": 1e11, "memory": 1e10, "link": 1e8, "call": 1e-4}


def times_of(scale=1.0):
    """Times (step, attention) that are the predicted ones, scaled."""
    model = SMALL
    first = judge(model, {shape: [(1.0, 1.0)] for shape in checked_shapes(model)}, SPEEDS, 2)
    of = {one["name"]: one for one in first.times}
    return {
        shape: [
            (
                scale * of[shape.name]["predicted_step_s"],
                scale * of[shape.name]["predicted_attention_s"],
            )
        ]
        for shape in checked_shapes(model)
    }, first.rates


def test_the_shapes_differ():
    shapes = checked_shapes(SMALL)
    assert {shape.cp for shape in shapes} == {1, 2, 4} and len(shapes) >= 6
    assert {"cp 1 direct", "cp 2 heads 2", "cp 4 heads 4", "cp 4 direct ring", "cp 4 ring"} <= {
        shape.name for shape in shapes
    }


def test_ranks_that_take_turns_hide_no_message():
    _, rates = times_of()
    for shape in checked_shapes(SMALL):
        together, own = (
            predict_attention(SMALL, shape, rates, turns=turns) for turns in (True, False)
        )
        assert together > own * (1 - 1e-9) if shape.cp > 1 else together == pytest.approx(own)


def test_what_is_predicted_right_is_judged_right():
    times, _ = times_of(1.1)
    found = judge(SMALL, times, SPEEDS, 2)
    assert found.spearman == pytest.approx(1) and found.error == pytest.approx(1 - 1 / 1.1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def test_steps_on_real_ranks(pool):
    for shape in checked_shapes(SMALL)[1:4:2]:
        times = pool.run(tune_check.one_step, 4, SMALL, shape)
        assert all(0 < attention < step for step, attention in times)
    speeds = pool.run(tune_check.measure_speeds, 4, SMALL)
    assert speeds[0].keys() == SPEEDS.keys() and all(
        value > 0 for rank in speeds for value in rank.values()
    )


@pytest.mark.slow
def test_the_model_predicts_order_and_time_on_this_machine():
    """In CPU time, since tests share the machine; for wall time on an idle one the command itself
    promises more.
    """
    found = tune_check.run(repeats=5, cpu=True)
    assert found.spearman >= 0.6 and found.error < 0.25, found
