"""What a step adds to TensorBoard: tokens per second of training time alone, memory; and the patch
that installs it.
"""

from types import SimpleNamespace

import pytest
import torch

from cp_ring.megatron.training_log import StepLine


class Megatron:
    """What the wrapped function reads: arguments, a clock that it may stop, a TensorBoard writer."""

    def __init__(self, log_interval=1, consumed=0):
        self.args = SimpleNamespace(
            curr_iteration=consumed // 2 - 1,
            consumed_train_samples=consumed,
            train_iters=10,
            global_batch_size=2,
            seq_length=100,
            log_interval=log_interval,
        )
        self.seconds = 0.0
        self.scalars = {}
        self.logged = []

    def training_log(self, losses, learning_rate, grad_norm):
        self.logged.append((learning_rate, grad_norm))
        return "flag"

    def step(self, line, seconds, loss):
        self.args.curr_iteration += 1
        self.args.consumed_train_samples += 2
        self.seconds += seconds
        return line({"lm loss": torch.tensor(loss)}, 1e-3, grad_norm=torch.tensor(0.5))

    def line(self):
        writer = SimpleNamespace(
            add_scalar=lambda name, value, step: self.scalars.setdefault(name, {}).update(
                {step: value}
            )
        )
        timer = SimpleNamespace(active_time=lambda: self.seconds)
        functions = SimpleNamespace(
            get_args=lambda: self.args, get_timers=lambda: lambda name: timer,
            get_tensorboard_writer=lambda: writer, get_wandb_writer=lambda: None,
        )  # fmt: skip
        return StepLine(self.training_log, functions)


def test_each_step_has_its_own_rate(one_rank, capsys):
    megatron = Megatron()
    line = megatron.line()
    assert megatron.step(line, 2.0, 8.5) == "flag"
    megatron.step(line, 0.5, 8.25)
    assert megatron.scalars["tokens per second"] == {1: 100.0, 2: 400.0}
    assert megatron.scalars["peak memory of a rank (bytes)"][2] > 10 << 20
    assert megatron.logged == [(1e-3, 0.5)] * 2
    assert not capsys.readouterr().out, "Megatron has printed the step"


def test_the_times_of_a_sampled_step_are_in_the_log(one_rank):
    from cp_ring.observe.timing import Findings

    found = Findings(step=2, computing=0.4, waiting=0.1, plans=0.0, slowest=None, slower=1.1)
    megatron, asked = Megatron(log_interval=2), []
    line = megatron.line()
    line.timing = SimpleNamespace(
        end_of_step=lambda step, last: asked.append((step, last)) or ([found] if step == 3 else [])
    )
    logged = []
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    line.megatron.get_wandb_writer = lambda: wandb
    for _ in range(10):
        megatron.step(line, 1.0, 3.0)
    assert asked == [(step, step == 10) for step in range(1, 11)]
    assert megatron.scalars["cp_ring/exposed communication (ms)"] == {2: pytest.approx(100)}
    assert [step for _, step in logged] == [3] and logged[0][0][
        "cp_ring/slowest rank over the median"
    ] == 1.1
