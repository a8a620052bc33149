"""The fake GPUs, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import needs
from tests.fakegpu.build import Missing
from tests.fakegpu.process import FakeGpus


@pytest.fixture(scope="module")
def gpus() -> Iterator[FakeGpus]:
    """Runs programs on fake GPUs. Skips the test where torch has no CUDA, or headers are missing;
    in CI it fails.
    """
    try:
        made = FakeGpus()
    except Missing as missing:
        needs.skip_or_fail(str(missing))
    yield made
    made.close()
