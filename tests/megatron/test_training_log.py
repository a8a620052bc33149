"""What a sampled step adds to TensorBoard and Weights & Biases."""

from types import SimpleNamespace

import pytest
from megatron.training import global_vars

from cp_ring.megatron import step_timing
from cp_ring.observe.timing import Findings


@pytest.mark.parametrize("interval, ends", [(None, {10}), (4, {4, 8, 10})])
def test_the_times_of_a_sampled_step_are_in_the_log(monkeypatch, interval, ends):
    """Also those of the last step, which --exit-interval may name."""
    found = Findings(step=2, computing=0.4, waiting=0.1, plans=0.0, slowest=None, slower=1.1)
    asked, scalars, logged = [], [], []
    args = SimpleNamespace(curr_iteration=-1, train_iters=10, exit_interval=interval)
    tensorboard = SimpleNamespace(add_scalar=lambda *row: scalars.append(row))
    wandb = SimpleNamespace(log=lambda *row: logged.append(row))
    for name, value in {
        "ARGS": args,
        "TENSORBOARD_WRITER": tensorboard,
        "WANDB_WRITER": wandb,
    }.items():
        monkeypatch.setattr(global_vars, f"_GLOBAL_{name}", value)
    monkeypatch.setattr(
        step_timing, "end_of_step",
        lambda step, last: asked.append((step, last)) or [found] * (step == 3),
    )  # fmt: skip
    for _ in range(10):
        args.curr_iteration += 1
        assert step_timing.log_step(lambda *given, **named: (given, named), 8.5, norm=0.5) == (
            (8.5,),
            {"norm": 0.5},
        )
    assert asked == [(step, step in ends) for step in range(1, 11)]
    assert ("cp_ring/exposed communication (ms)", pytest.approx(100), 2) in scalars
    assert [step for _, step in logged] == [3]
    assert logged[0][0]["cp_ring/slowest rank over the median"] == 1.1
