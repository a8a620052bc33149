"""The line per step: loss, tokens per second of training time alone, memory; and the patch that installs it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cp_ring.megatron.training_log import StepLine


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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

    def training_log(self, losses, *rest):
        self.logged.append(rest)
        return "flag"

    def step(self, line, seconds, loss):
        self.args.curr_iteration += 1
        self.args.consumed_train_samples += 2
        self.seconds += seconds
        return line({"lm loss": torch.tensor(loss)}, "x", "y")

    def line(self):
        writer = SimpleNamespace(add_scalar=lambda name, value, step: self.scalars.setdefault(name, {}).update({step: value}))
        timer = SimpleNamespace(active_time=lambda: self.seconds)
        return StepLine(self.training_log, lambda: self.args, lambda: lambda name: timer, lambda: writer)


def test_each_step_has_its_own_rate(one_rank, capsys):
    megatron = Megatron()
    line = megatron.line()
    assert megatron.step(line, 2.0, 8.5) == "flag"
    megatron.step(line, 0.5, 8.25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/10 | lm loss 8.5000 | 100 tokens/s | ")
    assert lines[1].startswith("step 2/10 | lm loss 8.2500 | 400 tokens/s | ")
    assert all(line.endswith(" GiB per rank") for line in lines)
    assert megatron.scalars["tokens per second"] == {1: 100.0, 2: 400.0}
    assert megatron.scalars["peak memory of a rank (bytes)"][2] > 10 << 20
    assert megatron.logged == [("x", "y")] * 2


def test_log_interval_and_resumption(one_rank, capsys):
    megatron = Megatron(log_interval=4, consumed=10)
    line = megatron.line()
    for _ in range(5):  # steps 6 to 10: the first one is always shown, then every fourth
        megatron.step(line, 1.0, 3.0)
    lines = capsys.readouterr().out.splitlines()
    assert [text.split(" | ")[0] for text in lines] == ["step 6/10", "step 8/10"]
    assert [text.split(" | ")[2] for text in lines] == ["200 tokens/s", "200 tokens/s"]


def test_patch_wraps_and_restores_megatrons_function():
    from megatron.training import training

    from cp_ring import patches

    original = training.training_log
    patch = patches.get("step_line")
    patch.apply()
    try:
        assert isinstance(training.training_log, StepLine) and training.training_log.training_log is original
    finally:
        patch.revert()
    assert training.training_log is original
