"""A kernel and a route from outside of cp_ring are selectable by name once registered; options.py
names none of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import types
from dataclasses import replace

import pytest
import torch

from cp_ring import ConfigError, Options, options, ring_attention
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.reference import ReferenceKernel
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.routes import ROUTES, Route, direct
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case


class Probe(ReferenceKernel):
    name = "probe"
    calls = 0

    def forward(self, *args, **options):
        Probe.calls += 1
        return super().forward(*args, **options)


def register() -> None:
    REGISTRY["probe"] = "tests_probe_kernel"
    ROUTES["express"] = Route(lambda need, cp: tuple(replace(table) for table in direct(need, cp)))
    LAYOUTS["striped"] = lambda mask, cp: Layout.contiguous(mask.n, cp)


@pytest.fixture
def registries(monkeypatch):
    """The registries, restored afterwards, and a module with the kernel."""
    module = types.ModuleType("tests_probe_kernel")
    module.KERNEL = Probe()
    monkeypatch.setitem(sys.modules, "tests_probe_kernel", module)
    monkeypatch.setattr(Probe, "calls", 0)
    kept = [(registry, dict(registry)) for registry in (REGISTRY, ROUTES, LAYOUTS)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)
    options.load_plugins.cache_clear()


def test_selected_by_setting_and_by_call(registries):
    for values in ({"kernel": "probe"}, {"route": "express"}, {"layout": "striped"}):
        with pytest.raises(ConfigError, match="input should be"):
            Options.make(**values)
    register()
    made = Options.make(kernel="probe", route="express", layout="striped")
    parser = Options.add_arguments(argparse.ArgumentParser())
    assert Options.from_args(parser.parse_args(made.to_args())) == made
    assert "reference, probe" in parser.format_help()

    def case(group):
        q, k, v = (x.chunk(2, 1)[group.rank] for x in Case.draw(16)[:3])
        return ring_attention(
            q, k, v, group, causal=True, kernel=made.kernel, route=made.route, layout=made.layout
        )

    assert torch.cat(LocalRing(2).run(case), 1).isfinite().all()
    assert Probe.calls == 3  # two causal tiles, one full one


def test_plugins_are_loaded_when_a_name_is_unknown(registries, monkeypatch):
    entry = importlib.metadata.EntryPoint("probe", "tests_probe_plugin", options.PLUGINS)
    wanted = {"group": options.PLUGINS}
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **query: [entry] if query == wanted else []
    )

    options.load_plugins.cache_clear()
    with pytest.raises(
        ConfigError, match=r"plugin probe .tests_probe_plugin. cannot be imported: No module named"
    ):
        Options.make(kernel="probe")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda entry: register())
    assert Options.make(kernel="probe").kernel == "probe"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"kernel": "magic"},
            "--cp-ring-kernel 'magic': input should be 'auto', 'transformer_engine', 'cudnn', "
            "'flash',",
        ),
        (
            {"layout": "diagonal"},
            "--cp-ring-layout 'diagonal': input should be 'zigzag', 'contiguous' or 'balanced'",
        ),
        (
            {"route": "pigeon"},
            "--cp-ring-route 'pigeon': input should be 'auto', 'direct', 'ring' or 'relay'",
        ),
        (
            {"wire_dtype": "int8"},
            "--cp-ring-wire-dtype 'int8': input should be 'input', 'float32' or 'bfloat16'",
        ),
    ],
)
def test_bad_names_are_one_line_that_names_the_flag(values, says):
    with pytest.raises(ConfigError) as raised:
        Options.make(**values)
    assert says in str(raised.value) and "\n" not in str(raised.value)
