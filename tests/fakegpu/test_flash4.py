"""The calls of plans, compiled by flash-attn 4 for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import needs
from tests.fakegpu import flash4
from tests.fakegpu.build import Missing
from tests.fakegpu.process import FakeGpus, ProgramError

PROGRAM = "tests.fakegpu.flash4:compiled"


@pytest.fixture(scope="module")
def with_flash4() -> Iterator[FakeGpus]:
    try:
        gpus = FakeGpus(more=flash4.paths())
    except Missing as missing:
        needs.skip_or_fail(str(missing))
    yield gpus
    gpus.close()


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 100])
def test_flash_attn_4_compiles_every_call(with_flash4, sm):
    (log,) = with_flash4.run(PROGRAM, 1, sm, cases=flash4.CASES)
    parts = dict.fromkeys(event.part for event in log.events)
    assert {f"{name}: {', '.join(flash4.FUNCTIONS)}" for name in flash4.CASES} <= set(parts)


@pytest.mark.slow
def test_a_call_that_does_not_compile_is_seen(with_flash4):
    with pytest.raises(ProgramError, match="not supported on SM100"):
        with_flash4.run(PROGRAM, 1, 100, cases={"wide": {"size": 160}}, planted=True)
