"""The real TransformerEngine on fake GPUs: what it rejects under `p2p` ends in cp_ring's ring, which
waits for the device once a microbatch of packed documents, and else never.
"""

import pytest

from tests.fakegpu import te_build
from tests.fakegpu.conftest import _started
from tests.fakegpu.replay import hangs, in_flight_together, mismatches
from tests.fakegpu.test_ring import races, slow_steps

CASES = {
    "causal": {},
    "window": {"window_size": (100, 0)},
    "sink": {"softmax_type": "learnable"},
    "window and sink": {"window_size": (100, 0), "softmax_type": "learnable"},
    "heads": {"comm": "a2a", "heads": (3, 1)},
    "packed": {"edges": [0, 64, 64, 320, 512], "window_size": (100, 0)},
}
# TransformerEngine has no cuDNN kernel of packed documents before Hopper
ON_AMPERE = {name: case for name, case in CASES.items() if name != "packed"}
OF_FOUR = {"window": CASES["window"], "two groups": {"comm": "a2a+p2p", "window_size": (100, 0)}}
ALL = {"edges": [0, 64, 64, 320, 2048], "window_size": (100, 0), "softmax_type": "learnable"}
OF_EIGHT = {"packed": ALL}


@pytest.fixture(scope="module", params=[te_build.VERSION, "2.14.0"])
def version(request):
    yield from _started(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, sm, cases", [(2, 90, CASES), (2, 80, ON_AMPERE), (4, 90, OF_FOUR), (8, 90, OF_EIGHT)]
)
def test_windows_and_sinks_end_in_the_ring(version, ranks, sm, cases):
    logs = version.run("tests.fakegpu.beneath:blocks", ranks, sm, cases=cases)
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown() and not log.stubs()
        assert not in_flight_together(log)
        for case in cases:
            for step in (1, 2):
                part = f"{case} {step}"
                waits = [*log.syncs(part), *log.copies(part)]
                assert len(waits) == 2 * (case == "packed"), waits  # a copy, and the wait for it
            assert not log.allocations(f"{case} 2")
            assert log.kernels(f"{case} 1") == log.kernels(f"{case} 2") != []


@pytest.mark.slow
def test_layers_of_megatron_keep_their_class(with_te):
    cases = {
        name: CASES[name] | {"options": None} for name in ("window", "sink", "window and sink")
    }
    logs = with_te.run("tests.fakegpu.beneath:layers", 2, 90, cases=cases)
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown()
        assert not any(slow_steps(log, case) for case in cases)
