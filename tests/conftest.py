"""Settings of the whole test suite, fixtures that several tests use, and how tests are divided
among worker processes.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing as mp
import os
from pathlib import Path

import pytest
import torch

from cp_ring import patches
from cp_ring.comm.codecs import CODECS
from cp_ring.kernels import REGISTRY
from cp_ring.megatron.compat import functions_uncompiled
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.sizes.attention_sizes import WIRES
from cp_ring.runtime import RUNTIME
from tests.rank_pool import Ranks

# Ranks of a test share the machine's cores and talk over loopback.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # collects tests, most of which need Megatron
    with functions_uncompiled(), contextlib.suppress(ImportError):
        importlib.import_module("megatron.core")

# What takes longest starts first, so that no worker is busy with it at the end when the others have
# nothing left to do. Roughly in descending order of wall time; a name is that of a group (see
# `group`) or of a test function. xdist gives each worker two of these at once.
LONG = (
    "slurm",
    "test_models_train_as_without_context_parallelism_and_a_planted_fault_shows",
    "test_a_new_user",
    "tests/fakegpu/test_ring.py",
    "tests/megatron/test_certificate.py",
    "pool",
    "test_a_rank_that_fails_ends_its_job_wherever_it_fails",
    "test_an_unmodified_script_trains_with_ring_attention",
    "test_error_over_that_of_one_rank",
    "test_a_rank_that_sleeps_in_a_hop_is_named",
    "test_random_plans_are_right",
    "tests/launch/test_wheel.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--megatron-lm",
        help="a checkout of Megatron-LM whose scripts to run; first on PYTHONPATH",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """For `-n auto`: a worker for each core, at most 8, for the memory of ranks.

    Each imports torch and Megatron and has a fork server of its own, so that more of them would
    cost more than their tests.
    """
    return min(len(os.sched_getaffinity(0)), 8)


def group(item):
    """The tests of a group run one after another in one worker. They share what is started once: a
    Slurm cluster, the pool of ranks, or what a fixture of their module has trained. Other tests run
    alone, in any worker: None."""
    names = [marker.args[0] for marker in item.iter_markers("xdist_group")]
    if names:
        return str(names[0])
    if "pool" in getattr(item, "fixturenames", ()):
        return "pool"
    fixtures = getattr(item, "_fixtureinfo", None)
    shared = fixtures and any(
        defs[-1].scope == "module" for defs in fixtures.name2fixturedefs.values()
    )
    return item.location[0] if shared else None


def pytest_itemcollected(item):
    """Marks groups for `--dist loadgroup`; xdist reads the marks when all tests are collected."""
    if name := group(item):
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Puts long tests first when workers divide them; apart from this the order is that of
    pytest-randomly.
    """
    places = {name: place for place, name in enumerate(LONG)}

    def place(item):
        function = getattr(item, "originalname", item.name)
        return min(places.get(group(item) or "", len(LONG)), places.get(function, len(LONG)))

    if hasattr(config, "workerinput"):
        items.sort(key=place)


@pytest.fixture(autouse=True)
def same_random_tensors():
    """A test draws the same numbers of torch whichever tests ran before; pytest-randomly does so
    for random and numpy.
    """
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """A test may change settings, caches and notes of the process; the next one finds them as they
    were.
    """
    yield
    RUNTIME.reset()
    faulthandler.cancel_dump_traceback_later()  # which ends a job that has failed


@pytest.fixture
def registries():
    """What a test registers is gone after it."""
    kept = [(registry, dict(registry)) for registry in (LAYOUTS, ROUTES, REGISTRY, CODECS, WIRES)]
    yield
    for registry, entries in kept:
        registry.clear()
        registry.update(entries)


@pytest.fixture
def megatron_lm(request):
    """The checkout named by --megatron-lm."""
    if not (named := request.config.getoption("--megatron-lm")):
        pytest.skip("--megatron-lm names no checkout")
    return Path(named).resolve()


_pools = []


@pytest.fixture
def pool():
    """Four gloo ranks, started once and again only after a failure."""
    if not _pools or _pools[-1].closed:
        # as tests.megatron.launch
        mp.get_context("forkserver").set_forkserver_preload(["tests.megatron.imported"])
        _pools.append(Ranks(4))
    yield _pools[-1]


def pytest_sessionfinish():
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
    if torch.cuda.is_available():
        pytest.skip("the CPU runtime is inert where CUDA is present")
    applied("cpu_runtime")
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
