"""The adapter stands alone: a model needs no flag and no patch for it."""

import tomllib
from pathlib import Path

from launch.budget import ROOMS, ROOT, files
from tests.megatron.launch import launch

HERE = Path(__file__).parent


def test_a_layer_by_its_specification_trains_as_without_context_parallelism():
    done = launch(2, [str(HERE / "adapter_alone.py")])
    assert done.returncode == 0, done.stdout[-4000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("ring 2:")}
    assert said == {"ring 2: cp_ring.megatron cp_ring.megatron.adapter cp_ring.megatron.wrapping"}


def test_the_room_of_the_adapter_is_all_that_it_may_import():
    """So the limit of the room limits the closure of its imports: each other module of ring 2 is
    forbidden to it.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (alone,) = [each for each in contracts["contracts"] if each["name"].startswith("The adapter")]
    forbidden = [name.replace(".", "/") for name in alone["forbidden_modules"]]
    (room,) = [each for each in ROOMS if each.name == "adapter"]
    rest = {*files("cp_ring/megatron")} - {*files(*room.paths)} - {"cp_ring/megatron/__init__.py"}
    assert rest and not [path for path in rest if not path.startswith(tuple(forbidden))]
