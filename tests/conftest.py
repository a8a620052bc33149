"""Settings of the whole test suite, and fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cp_ring.bench.ranks import Ranks

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
