"""That `auto` takes no kernel that cannot run the calls of a plan, forward and backward."""

import pytest

from cp_ring.kernels import te_library
from tests.fakegpu.kernel_calls import CASES, KERNELS, verdict

PROGRAM = "tests.fakegpu.kernel_calls:calls"


HUGE = {name: case for name, case in CASES.items() if name.endswith(", deterministic")}


def workspaces(log, cases, kernel="auto"):
    """What runs each case, without the size of a workspace below a GiB."""
    return {name: verdict(log, kernel, name, 1 << 30) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_auto_runs_every_call(with_te, sm):
    (log,) = with_te.run(PROGRAM, 1, sm, kernels=KERNELS[-1:], cases=CASES)
    runs = workspaces(log, CASES)
    assert set(runs.values()) <= {"cuDNN", "flash", "efficient", "products"}, runs
    # the kernels of the library that comes first, where it has them
    assert sm == 80 or runs["packed"] == "cuDNN"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sm, expected",
    [(80, {"cuDNN 1,088 MiB"}), (90, {"cuDNN 131,072 MiB"}), (100, {"cuDNN", "no"})],
)
def test_deterministic_calls_that_no_fault_keeps_away_are_seen(with_te, sm, expected):
    (log,) = with_te.run(PROGRAM, 1, sm, kernels=KERNELS[-1:], cases=HUGE, planted=True)
    assert expected & set(workspaces(log, HUGE).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted, limit, expected",
    [(False, "", "flash"), (True, "", "cuDNN 131,072 MiB"), (False, "268435456", "cuDNN")],
)
def test_the_newest_cudnn_needs_a_variable_on_hopper(newest, planted, limit, expected):
    variables = {te_library.LIMIT: limit} if limit else {}  # cuDNN takes an empty one for 0
    case = "packed, deterministic"
    (log,) = newest.run(
        PROGRAM, kernels=["auto"], cases={case: CASES[case]}, planted=planted, variables=variables
    )
    assert workspaces(log, [case]) == {case: expected}


@pytest.mark.ci
def test_a_kernel_that_promises_too_much_is_seen(gpus):
    arguments = {"kernels": ["auto"], "cases": {"heads of 512": CASES["heads of 512"]}}
    for planted, expected in ((False, "efficient"), (True, "no")):
        (log,) = gpus.run(PROGRAM, 1, 100, planted=planted, **arguments)
        assert verdict(log, "auto", "heads of 512") == expected


@pytest.mark.ci
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_wide_heads_have_a_kernel(gpus, sm):
    cases = {name: case for name, case in CASES.items() if "512" in name}
    (log,) = gpus.run(PROGRAM, 1, sm, kernels=["auto"], cases=cases)
    assert {verdict(log, "auto", case) for case in cases} == {"efficient"}
