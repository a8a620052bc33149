"""The docstring of each public function has an example after its first paragraph, and it runs."""

import inspect
import textwrap

import numpy as np
import pytest
import torch

import cp_ring
from cp_ring import kernels, plan
from cp_ring.kernels import base
from cp_ring.megatron.data import packing
from cp_ring.observe import counters, debug

MADE_BY_OTHERS = {"HeadSplit", "Hop", "Lowered", "PrefixPack", "RankPlan", "Report", "Transfer"}
"""Results, which nobody makes by hand."""
OTHERS = (base.determinism, kernels.choose, packing.pack, counters.record, debug.debugging)


def public():
    """Functions and classes by their names, with the constructors of masks, layouts and plans."""
    for package in (cp_ring, plan):
        for name in package.__all__:
            each = getattr(package, name)
            error = inspect.isclass(each) and issubclass(each, Exception)
            if callable(each) and not error and name not in MADE_BY_OTHERS:
                yield name, each
    for kind in (cp_ring.Mask, cp_ring.Layout, cp_ring.Plan):
        for name, each in inspect.getmembers(kind, inspect.ismethod):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}", each
    yield from ((each.__name__, each) for each in OTHERS)
    for name in ("merged", "positions", "shard", "unshard"):
        yield f"Layout.{name}", getattr(cp_ring.Layout, name)
    yield from (("Mask &", cp_ring.Mask.__and__), ("Plan.verify", cp_ring.Plan.verify))


PUBLIC = dict(public())


def example(each):
    code = (inspect.getdoc(each) or "").split("\n\n")[1:2]
    return textwrap.dedent(code[0]) if code and code[0].startswith("    ") else ""


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_docstring_runs(name):
    n, cp = 16, 2
    mask, layout = cp_ring.Mask.causal(n), cp_ring.Layout.zigzag(n, cp)
    x = torch.zeros(1, n, 2, 64)
    names = {name: getattr(cp_ring, name) for name in cp_ring.__all__}
    names |= {name: getattr(plan, name) for name in plan.__all__} | vars(base)
    names |= {each.__name__: each for each in OTHERS}
    names |= {
        "cp_ring": cp_ring, "np": np, "torch": torch, "n": n, "cp": cp, "mask": mask, "x": x,
        "layout": layout, "plan": cp_ring.Plan.build(mask, layout), "group": None,
        "q": x, "k": x, "v": x, "tokens": x[..., 0, 0].long(), "labels": x[..., 0, 0].long(),
        "logits": x, "prompt": [1, 2], "a": [3], "b": [4], "heads": 2, "key_dim": 48,
        "latent": x[:, :, 0, :32], "rope": x[:, :, 0, :16], "weight": torch.zeros(2 * 96, 32),
    }  # fmt: skip
    code = example(PUBLIC[name])
    assert code, f"{name}: its docstring has no example after the first paragraph"
    exec(code, names)
