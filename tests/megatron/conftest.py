"""Fixtures of the tests that run Megatron in this process."""

import pytest
import torch

from cp_ring import patches


@pytest.fixture
def applied():
    """Applies patches by name, and reverts them afterwards, in reverse order."""
    done = []

    def apply(*names):
        for name in names:
            patches.get(name).apply()
            done.append(name)

    yield apply
    for name in reversed(done):
        patches.get(name).revert()


@pytest.fixture
def one_rank(applied, tmp_path):
    """Megatron's process groups for a job of one rank in this process, on the CPU."""
    applied("cpu_runtime")
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
