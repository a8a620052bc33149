"""What whole calls of `ring_attention`, forward and backward, ask of CUDA and NCCL, by torch's own
code on fake GPUs: waits, copies, memory, the order of streams, graphs and messages.

Each assertion finds faults that are planted for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.fakegpu import te_build
from tests.fakegpu.log import Log
from tests.fakegpu.process import FakeGpus
from tests.fakegpu.replay import hangs, in_flight_together, mismatches

RANKS = 4
FLASH = {"causal": True, "kernel": "flash_aten"}
FEW = {
    "causal": FLASH,
    "packed": FLASH | {"cu_seqlens": [0, 100, 300, 301, 700, 1024]},
    "heads": FLASH | {"heads": 2, "sizes": (8, 4, 64, 64)},  # two groups of heads a rank
}
ALL = FEW | {
    "full": {"kernel": "flash_aten"},
    "one source a hop": FLASH | {"schedule": "ring"},
    "gather": FLASH | {"schedule": "gather"},
    "relay": FLASH | {"route": "relay", "node_size": 2},
    "window": FLASH | {"window_size": (100, 0), "layout": "contiguous"},
    "sink": FLASH | {"sink": True},
    "sizes": FLASH | {"sizes": (4, 4, 192, 128), "wire_dtype": "float32"},
    "all heads": FLASH | {"heads": 4},
    "shared heads": FLASH | {"heads": 2, "sizes": (4, 1, 64, 64)},
    "int8": FLASH | {"wire": "int8"},
    "fp8": FLASH | {"wire": "fp8"},
    "deterministic": FLASH | {"deterministic": True},
    "latent": FLASH | {"latent": 128, "sizes": (4, 4, 128, 128)},
}
CASES = {80: FEW, 90: ALL, 100: FEW}
CUDNN = {"causal": {"causal": True, "kernel": "cudnn", "sizes": (4, 2, 128, 128)}}


def slow_steps(log: Log, case: str) -> list[str]:
    """What a step must not do, once there was one like it."""
    return [
        str(event)
        for step in (1, 2)
        for event in (*log.syncs(f"{case} {step}"), *log.copies(f"{case} {step}"),
                      *log.allocations(f"{case} {step}"))
    ]  # fmt: skip


def races(log: Log, case: str = "") -> list[str]:
    return [race for race in log.races if race.count(f" in {case}") == 2]


def capture_faults(log: Log, case: str = "") -> list[str]:
    return [fault for fault in log.capture_faults if f", in {case}" in fault]


@pytest.fixture(scope="module")
def clean(gpus: FakeGpus) -> Callable[[int], list[Log]]:
    """The logs of `CASES` on GPUs of a compute capability."""
    program = "tests.fakegpu.programs:rings"
    return cache(lambda sm: gpus.run(program, RANKS, sm, cases=CASES[sm], captured=True))


capabilities = pytest.mark.parametrize(
    "sm", [90, *(pytest.param(sm, marks=pytest.mark.ci) for sm in (80, 100))]
)


@capabilities
def test_a_step_neither_waits_nor_copies_nor_allocates(clean, sm):
    for log in clean(sm):
        for case in CASES[sm]:
            assert not slow_steps(log, case)
            kernels = [log.kernels(f"{case} {step}") for step in (1, 2)]
            assert kernels[0] == kernels[1] and any("flash_bwd" in x.name for x in kernels[0])


@capabilities
def test_streams_wait_for_each_other_before_they_read_or_reuse_memory(clean, sm):
    for log in clean(sm):
        assert not races(log) and not log.unknown()


@capabilities
def test_groups_of_messages_complete_whoever_comes_first(clean, sm):
    logs = clean(sm)
    assert not hangs(logs) and not mismatches(logs)
    assert not any(map(in_flight_together, logs))
    for case in CASES[sm]:
        assert any(group.part == f"{case} 2" for group in logs[0].groups)


@capabilities
def test_captures_of_graphs_join_all_streams(clean, sm):
    for log in clean(sm):
        assert not capture_faults(log)
        for case in CASES[sm]:
            assert log.kernels(f"{case} capture") and log.of(f"{case} capture", "nccl")


@capabilities
def test_nothing_of_the_libraries_that_was_called_is_a_stub(clean, sm):
    assert not set().union(*(log.stubs() for log in clean(sm)))


@pytest.mark.ci
@capabilities
def test_cudnn(gpus, sm):
    """With plans of the real cuDNN for each device."""
    logs = gpus.run("tests.fakegpu.programs:rings", 2, sm, cases=CUDNN)
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not slow_steps(log, "causal") and not races(log)
        assert [x for x in log.kernels("causal 2") if x.name.startswith("cudnn")]


# Of TransformerEngine 2.20 with cuDNN 9.20; other kernels run them.
LACKS = {80: ("packed", "sizes"), 90: ("deterministic",)}


@pytest.mark.slow
@pytest.mark.parametrize("version", te_build.VERSIONS)
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_transformer_engine(version, sm):
    """Its own library and extension, with plans of the real cuDNN for each device."""
    cases = {
        name: {"sizes": (4, 2, 128, 128), "tokens": 512} | case | {"kernel": "transformer_engine"}
        for name, case in ALL.items()
        if name not in ("relay", "all heads", *LACKS.get(sm, ()))
    }
    gpus = FakeGpus(version)
    try:
        logs = gpus.run("tests.fakegpu.programs:rings", 2, sm, cases=cases, steps=3)
    finally:
        gpus.close()
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown() and not log.stubs()
        for case in cases:
            assert not slow_steps(log, case)
        assert [x for x in log.kernels("causal 2") if x.name.startswith("cudnn")]


def of_each(finds: Callable[[Log, str], list[str]]) -> Callable[[list[Log], str], bool]:
    return lambda logs, case: all(finds(log, case) for log in logs)


slow, racing, in_a_capture = map(of_each, (slow_steps, races, capture_faults))
FINDS = {
    "lost wait for keys": racing,
    "lost wait for gradients": racing,
    "early reuse of a slot": racing,
    "sync in a hop": slow,
    "value in a hop": slow,
    "copy in a hop": slow,
    "memory in a hop": slow,
    "values before keys": lambda logs, case: bool(mismatches(logs, case)),
    "sends before receives": lambda logs, case: bool(hangs(logs, case)),
    "early free in a hop": racing,
    "fork in a hop": racing,
    "two communicators": lambda logs, case: all(in_flight_together(log, case) for log in logs),
}
# The others torch rejects by itself, or they are none in a graph.
CAPTURED = ("lost wait for gradients", "sync in a hop", "value in a hop", "fork in a hop")


@pytest.fixture(scope="module")
def planted(gpus: FakeGpus) -> Callable[[bool], list[Log]]:
    """The logs of calls with one planted fault each, one after another; and of captures of such."""

    def run(captured: bool) -> list[Log]:
        options = ALL["one source a hop"] | ALL["sizes"]
        cases = dict.fromkeys(CAPTURED if captured else FINDS, options)
        if not captured:
            cases["two communicators"] = ALL["heads"]
        program = "tests.fakegpu.programs:rings"
        return gpus.run(program, RANKS, 90, cases=cases, planted=True, captured=captured)

    return cache(run)


@pytest.mark.ci
@pytest.mark.parametrize("plant", FINDS)
def test_a_planted_fault_is_found(planted, plant):
    assert FINDS[plant](planted(False), plant)


@pytest.mark.ci
@pytest.mark.parametrize("plant", CAPTURED)
def test_a_planted_fault_is_found_in_a_capture(planted, plant):
    assert in_a_capture(planted(True), plant)
