"""That `auto` takes no kernel that cannot run the calls of a plan, forward and backward."""

from __future__ import annotations

import pytest

from tests.fakegpu.kernel_calls import CASES, KERNELS, verdict
from tests.fakegpu.process import FakeGpus
from tests.fakegpu.te_build import VERSIONS

PROGRAM = "tests.fakegpu.kernel_calls:calls"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_auto_runs_every_call(version, sm):
    gpus = FakeGpus(version)
    try:
        (log,) = gpus.run(PROGRAM, 1, sm, kernels=KERNELS[-1:], cases=CASES)
    finally:
        gpus.close()
    found = {case: verdict(log, "auto", case) for case in CASES}
    assert "no" not in found.values(), found
    # the kernels of the library that comes first, where it has them
    assert sm == 80 or found["packed"] == "cuDNN"


@pytest.mark.ci
def test_a_kernel_that_promises_too_much_is_seen(gpus):
    arguments = {"kernels": ["auto"], "cases": {"heads of 256": CASES["heads of 256"]}}
    for planted, expected in ((False, "flash"), (True, "no")):
        (log,) = gpus.run(PROGRAM, 1, 100, planted=planted, **arguments)
        assert verdict(log, "auto", "heads of 256") == expected


@pytest.mark.ci
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_wide_heads_have_a_kernel(gpus, sm):
    cases = {name: case for name, case in CASES.items() if "512" in name}
    (log,) = gpus.run(PROGRAM, 1, sm, kernels=["auto"], cases=cases)
    assert {verdict(log, "auto", case) for case in cases} == {"efficient"}
