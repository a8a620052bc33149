"""Settings of the whole test suite, and fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from cp_ring import patches
from cp_ring.testing.rank_pool import Ranks

# Ranks of a test share the machine's cores and talk over loopback.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-lm", action="append", default=[], help="a checkout of Megatron-LM whose script to run; repeatable"
    )


@pytest.fixture
def megatron_lm(request: pytest.FixtureRequest) -> list[str]:
    """The checkouts named by --megatron-lm."""
    checkouts: list[str] = request.config.getoption("--megatron-lm")
    return checkouts


_pools: list[Ranks] = []


@pytest.fixture
def pool() -> Iterator[Ranks]:
    """Four gloo ranks, started once and again only after a failure."""
    if not _pools or _pools[-1].closed:
        _pools.append(Ranks(4))
    yield _pools[-1]


def pytest_sessionfinish() -> None:
    for pool in _pools:
        pool.close()


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
