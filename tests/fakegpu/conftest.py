"""The fake GPUs, for the tests of a module."""

import pytest

from tests import needs
from tests.fakegpu import te_build
from tests.fakegpu.build import Missing
from tests.fakegpu.process import FakeGpus


def _started(*versions):
    try:
        gpus = FakeGpus(*versions)
    except Missing as missing:
        needs.skip_or_fail(str(missing))
    yield gpus
    gpus.close()


@pytest.fixture(scope="module")
def gpus():
    """Runs programs on fake GPUs. Skips the test where torch has no CUDA, or headers are missing;
    in CI it fails.
    """
    yield from _started()


@pytest.fixture(scope="module")
def with_te():
    """The same with the newest TransformerEngine."""
    yield from _started(te_build.VERSION)


@pytest.fixture(scope="module")
def newest():
    """With the newest TransformerEngine and the newest cuDNN."""
    yield from _started(te_build.VERSION, te_build.CUDNN)
