"""What a newcomer adds is one source file: a kernel, a route, a layout and a codec from outside of
cp_ring, which are selectable by name once registered; a setting, a rule and a patch in a copy of
its tree.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from cp_ring import Options, ring_attention
from cp_ring.comm.codecs import CODECS
from cp_ring.comm.plain import Plain
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.reference import ReferenceKernel
from cp_ring.plan.layout import LAYOUTS, Layout, NamedLayout
from cp_ring.plan.routes import ROUTES, Route, direct
from cp_ring.plan.sizes.attention_sizes import WIRES, Wire
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from launch.budget import ROOT
from tests.rank_pool import python
from tests.rings import said


class Probe(ReferenceKernel):
    name = "probe"
    calls = 0

    def forward(self, *args, **options):
        Probe.calls += 1
        return super().forward(*args, **options)


def register():
    REGISTRY["probe"] = "tests_probe_kernel"
    ROUTES["express"] = Route(lambda need, cp: tuple(replace(table) for table in direct(need, cp)))
    LAYOUTS["striped"] = NamedLayout(lambda mask, cp: Layout.contiguous(mask.n, cp))
    CODECS["same"] = type("Same", (Plain,), {"name": "same"})
    WIRES["same"] = Wire("same")


def test_selected_by_setting_and_by_call(registries, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests_probe_kernel", SimpleNamespace(KERNEL=Probe()))
    monkeypatch.setattr(Probe, "calls", 0)
    names = {"kernel": "probe", "route": "express", "layout": "striped", "wire": "same"}
    for values in ({name: value} for name, value in names.items()):
        assert "it must be" in said(Options.make, **values)
    register()
    made = Options.make(**names)
    parser = Options.add_arguments(argparse.ArgumentParser())
    assert Options.from_args(parser.parse_args(made.to_args())) == made
    assert "reference, probe" in parser.format_help()

    def case(group):
        q, k, v = (x.chunk(2, 1)[group.rank] for x in Case.draw(16)[:3])
        return ring_attention(q, k, v, group, causal=True, **names)

    assert torch.cat(LocalRing(2).run(case), 1).isfinite().all()
    assert Probe.calls == 3  # two causal tiles, one full one


ADDED = {
    "cp_ring/megatron/options.py": (
        "    cpu: bool = setting(\n",
        '    shiny: int = setting(3, "How much it shines.", least=1)\n',
    ),
    "cp_ring/megatron/flags/checks_job.py": (
        "JOB: tuple[Check, ...] = (",
        'lambda _, options: "too shiny: lower it" if options.shiny > 5 else None, ',
    ),
    "cp_ring/patches/shiny.py": (
        "",
        """
from cp_ring.patches.patch import Patch

def _replacements():
    import statistics

    yield statistics, "mean", lambda values: "shiny"

PATCH = Patch(
    what="a", why="b", replacements=_replacements,
    needed=lambda args, options: options.shiny > 4,
)
""",
    ),
}
USED = """
import argparse, statistics
import cp_ring, cp_ring.patches
from cp_ring import ConfigError, Options
from cp_ring.megatron.flags import resolve
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.tools.job import SECTIONS

assert cp_ring.__file__.startswith(ROOT)
parser = Options.add_arguments(argparse.ArgumentParser())
assert "How much it shines." in parser.format_help()
assert Options.from_args(parser.parse_args(["--cp-ring-shiny", "4"])).shiny == 4
assert SECTIONS["cp_ring"] is Options and Options.make(shiny="5").shiny == 5
try:
    Options.make(shiny=0)
except ConfigError as error:
    assert str(error).startswith("--cp-ring-shiny 0: ")
else:
    raise AssertionError
args, options = argparse.Namespace(), Options.make(shiny=6)
try:
    resolve.check(args, options)
except ConfigError as error:
    assert str(error) == "too shiny: lower it"
else:
    raise AssertionError
assert "shiny" in [each["name"] for each in cp_ring.patches.table()]
cp_ring.patches.apply_for(Asked(args), options, ["shiny"])
assert statistics.mean([1]) == "shiny"
"""


def test_a_setting_a_rule_and_a_patch_are_one_file_each(tmp_path):
    shutil.copytree(ROOT / "cp_ring", tmp_path / "cp_ring")
    for name, (place, text) in ADDED.items():
        path = tmp_path / name
        before = path.read_text() if place else ""
        assert before.count(place) == 1
        # a field goes before the place, an entry of a tuple behind its opening
        text = place + text if place.endswith("(") else text + place
        path.write_text(before.replace(place, text) if place else text)
    copy = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = python("-c", f"ROOT = {str(tmp_path)!r}\n{USED}", cwd=tmp_path, env=copy)
    assert done.returncode == 0, done.stderr
