"""Wrong calls of functions: the table is `calls.txt`."""

from __future__ import annotations

import math
import warnings

import torch

import cp_ring
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.plan.plan import plan
from cp_ring.testing.local_ring import LocalRing
from tests.inputs import Case, fault


def on(ranks, call):
    """The results of `call(group)` on so many ranks."""
    return LocalRing(ranks).run(call)


def plan_of(n, cp):
    return plan(cp_ring.Mask.causal(n), cp)


def names():
    """What an expression of the table may use."""
    torch.manual_seed(0)
    own = {name: getattr(cp_ring, name) for name in cp_ring.__all__ if name != "__version__"}
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    tensors = {"q": q, "k": k, "v": v, "ints": torch.tensor([1, 2]), "hidden": torch.randn(2, 4)}
    return own | tensors | {
        "torch": torch, "math": math, "LocalRing": LocalRing, "on": on, "plan": plan,
        "plan_of": plan_of,
    }  # fmt: skip


def attempt(case: Case) -> str:
    """Why the call does not end as it should, or ""."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module="cp_ring|tests")
            found = eval(case.text, names())
    except (ConfigError, KernelError, PlanError) as error:
        return fault(str(error), case.words)
    except Exception as error:
        usual = isinstance(error, TypeError) and case.kind == "unknown keywords"
        return fault(str(error), case.words) if usual else f"{type(error).__name__}: {error}"
    lines = [str(each.message) for each in warned]
    return fault("\n".join(lines), case.words) if lines else f"silent: {str(found)[:60]!r}"
