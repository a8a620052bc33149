"""The training script of `small_script`, which fails where the environment variable FAILS says:
PLACE:RANK, or PLACE:all. On the other ranks it goes on.
"""

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
PLACE, _, WHO = os.environ["FAILS"].partition(":")
MINE = os.environ["RANK"] == WHO or WHO == "all"


def fail(place):
    if place == PLACE and MINE:
        print(f"failing in {place}", flush=True)
        if place == "exit":
            sys.exit(3)
        raise ValueError(f"my own bug in {place}")


fail("start")

from tests.megatron import small_script as small  # noqa: E402

calls = []
forward_step, rows = small.forward_step, small.MockGPTDataset


class Rows(rows):
    def __getitem__(self, index):
        if index is not None and index > 5:
            fail("data")
        return super().__getitem__(index)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(calls) > 5:
            fail("backward")
        return gradient


def failing_step(data_iterator, model):
    # not while the job is certified, whose models for data are not wrapped
    if hasattr(small.get_args(), "curr_iteration") and hasattr(model, "module"):
        calls.append(1)
    if len(calls) > 5:
        fail("forward")
        fail("exit")
        if PLACE == "sleep":
            if MINE:
                time.sleep(600)
            raise ValueError("my own bug beside a rank that sleeps")
    if not torch.is_grad_enabled():
        fail("evaluation")
    output, loss = forward_step(data_iterator, model)
    return Backward.apply(output), loss


def main():
    from megatron.training import checkpointing

    small.MockGPTDataset, small.forward_step = Rows, failing_step
    state_dict = checkpointing.generate_state_dict

    def failing_state_dict(*args, **named):
        fail("save")
        return state_dict(*args, **named)

    checkpointing.generate_state_dict = failing_state_dict
    small.main()
    fail("end")


if __name__ == "__main__":
    main()
