"""Models of megatron.core alone, without its training loop: one step on two ranks against one, for
every kind of mask.

`bash launch/test.sh --compat` runs this with each supported version of megatron-core, CI with the
oldest.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from cp_ring.megatron import compat
from tests.megatron.core_worker import CASES, GENERATE
from tests.megatron.launch import HERE, launch

pytestmark = [pytest.mark.compat, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("core") / "out.json"
    done = launch(2, [str(HERE / "core_worker.py"), str(path)])
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(path.read_text())


def test_this_is_the_version_that_was_asked_for(results):
    assert results["version"] == compat.megatron_version()


def difference(ours, theirs):
    """Largest relative difference of the loss or of a parameter's gradient, the latter over the
    largest one of all.
    """
    largest = max(theirs["gradients"].values())
    gradients = [
        abs(ours["gradients"][name] - norm) / largest for name, norm in theirs["gradients"].items()
    ]
    return max(abs(ours["loss"] - theirs["loss"]) / theirs["loss"], *gradients)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(results, case):
    found = results["cases"][case]
    assert found["two"]["gradients"].keys() == found["one"]["gradients"].keys()
    assert difference(found["two"], found["one"]) < 1e-5
    assert difference(found["fault"], found["one"]) > 1e-4


@pytest.mark.parametrize("case", sorted(GENERATE))
def test_generation_from_a_cache(results, case):
    whole, cached = map(np.array, results["cases"][case]["generated"])
    assert whole.shape[0] == 9 and np.abs(cached - whole).max() < 1e-5
