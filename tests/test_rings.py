"""The three rings: the library needs torch and numpy alone, is quick to import, and a training job
imports little more than it runs.
"""

import json
import shlex

import pytest

from launch.budget import ROOT, tokens
from tests.megatron.launch import TINY, launch
from tests.rank_pool import python

LIMIT = 119_510  # tokens that a training job imports

ALONE = """
import importlib.metadata as metadata, re, sys

def needed(name, known):
    if name not in known:
        known.add(name)
        for text in metadata.requires(name) or []:
            if "extra ==" not in text:
                try:
                    needed(re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-"), known)
                except metadata.PackageNotFoundError:  # of another platform
                    pass
    return known

kept = needed("torch", needed("numpy", set()))
others = {
    package
    for package, owners in metadata.packages_distributions().items()
    if not {owner.lower().replace("_", "-") for owner in owners} & {*kept, "cp-ring", "setuptools"}
}

class Finder:
    # finds what another finder does, but for the packages that are to be absent

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in others
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]
assert {"typer", "psutil", "packaging", "yaml", "megatron"} <= others, others

import torch
import cp_ring
from cp_ring import Layout, Mask, Options, Plan

q, k, v = torch.randn(3, 1, 64, 4, 16).unbind()
out = cp_ring.ring_attention(q, k, v, causal=True, window_size=(8, 0))
assert out.shape == q.shape and out.isfinite().all()
mask = Mask.documents([0, 100, 256])
Plan.build(mask, Layout.balanced(mask, 4)).verify()
assert Options.make(layout="balanced", num_slots="3").num_slots == 3
from cp_ring.testing.local_ring import LocalRing
parts = LocalRing(2).run(
    lambda group: cp_ring.ring_attention(*cp_ring.shard((q, k, v), group=group), group, causal=True)
)
assert [part.shape[1] for part in parts] == [32, 32]

import cp_ring.megatron
for name in cp_ring.megatron.__all__:
    try:
        getattr(cp_ring.megatron, name)
    except ImportError as error:
        assert "needs the package" in str(error) and "pip install" in str(error), error
        assert "\\n" not in str(error)
    else:
        raise AssertionError(name)
import runpy
runpy.run_module("cp_ring.tools", run_name="__main__")
"""

LIGHT = """
import sys
import torch
before = set(sys.modules)
import cp_ring
print(*sorted(set(sys.modules) - before))
"""

JOB = """
import atexit, json, pathlib, runpy, sys

path = sys.argv.pop(1)

def write():
    files = [
        str(pathlib.Path(module.__file__).resolve())
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "cp_ring" and getattr(module, "__file__", None)
    ]
    pathlib.Path(path).write_text(json.dumps(files))

atexit.register(write)
runpy.run_module("cp_ring.pretrain_gpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.ci
def test_library_needs_torch_and_numpy_alone():
    done = python("-c", ALONE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("cp_ring: error: cp-ring needs the package typer: pip install")
    assert "pip install " in done.stderr


def test_importing_cp_ring_after_torch_loads_itself_alone():
    """So its time beyond that of torch is that of one small file, far below 0.15 s."""
    done = python("-c", LIGHT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cp_ring"]


@pytest.mark.ci
def test_what_a_training_job_imports(tmp_path):
    script, told = tmp_path / "job.py", tmp_path / "files.json"
    script.write_text(JOB)
    flags = shlex.split("--train-iters 1 --cp-ring --cp-ring-cpu --transformer-impl local")
    done = launch(1, [str(script), str(told), *TINY, *flags])
    assert done.returncode == 0, done.stdout
    files = {path.removeprefix(f"{ROOT}/") for path in json.loads(told.read_text())}
    assert "cp_ring/hop_loop.py" in files
    size = sum(map(tokens, files))
    print(f"a training job imports {size} tokens in {len(files)} files")
    assert not [path for path in files if path.startswith("cp_ring/tools")]
    assert size <= LIMIT
