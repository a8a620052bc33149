"""What import-linter cannot say: the plan uses no part of torch.distributed."""

import re
from pathlib import Path

import pytest

import cp_ring.plan
from tests.rank_pool import python


def test_plan_has_no_part_of_torch_distributed():
    files = [*Path(cp_ring.plan.__path__[0]).rglob("*.py")]
    assert len(files) > 3
    part = re.compile(r"torch\.distributed\.|(import|from) torch\.distributed|import distributed")
    assert not [file for file in files if part.search(file.read_text())]


SIDE_EFFECTS = """
import atexit, os, sys
import megatron.training.training, torch, torch.utils.data
from torch.nn.modules import module
from torch.utils.data._utils import collate

registered = []
for owner, name in ((atexit, "register"), (os, "register_at_fork")):
    setattr(owner, name, lambda *args, **named: registered.append(args or named))

def state():
    hooks = [len(value) for name, value in vars(module).items() if "_hooks" in name]
    return hooks, list(collate.default_collate_fn_map), list(registered)

before = state()
import importlib, pkgutil
import cp_ring.megatron, cp_ring.patches
for package in (cp_ring.megatron, cp_ring.patches):
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(each.name)
for name in ("sharding", "attention", "observe.watchdog", "comm.transport"):
    importlib.import_module(f"cp_ring.{name}")
assert state() == before, (before, state())
patch = cp_ring.patches.get("core_attention")
patch.apply()
assert state() != before
patch.revert()
assert state() == before, (before, state())
"""


@pytest.mark.ci
def test_importing_what_knows_megatron_changes_nothing():
    done = python("-c", SIDE_EFFECTS)
    assert done.returncode == 0, done.stderr[-2000:]
