"""python -m tests.accuracy [--dtype bfloat16]: the error of rings against float64, divided by the
error of one rank, which attends to the whole sequence with the same kernel.
"""

import argparse
import json

import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.testing.oracle import Case, error
from cp_ring.tools.bench import facts
from tests.rings import attend

PARTS = ("out", "dq", "dk", "dv")


def kinds(n):
    """A mask of each kind, for `n` tokens."""
    return {
        "causal": Mask.causal(n),
        "full": Mask.full(n),
        "window": Mask.causal(n, (n // 3, 0)),
        "documents": Mask.documents([0, n // 20, n // 2, n * 3 // 4, n]),
        "prefix": Mask.prefix(n, n // 4),
    }


def errors(got, truth):
    """The relative errors of out, dq, dk and dv."""
    return torch.tensor([error(x.cpu(), y.cpu()) for x, y in zip(got, truth, strict=True)])


def ratios(
    masks,
    cp,
    kernel="cpu",
    dtype="float32",
    device="cpu",
    *,
    sizes=(2, 1, 64),
    seeds=5,
    schedule="auto",
):
    """A result {mask, cp, out, dq, dk, dv} for each mask and context parallel size: mean ratios of
    so many draws. sizes: query heads, key/value heads, elements of a head.
    """
    h, g, d = sizes
    results = []
    for name, mask in masks.items():
        whole, found = Plan.build(mask, Layout.contiguous(mask.n, 1)), []
        for seed in range(seeds):
            drawn = Case.draw(mask.n, h=h, g=g, d=d, seed=seed, dtype=torch.float64)
            case = Case(*(x.to(device, getattr(torch, dtype)) for x in drawn))
            truth = attend(Case(*(x.double() for x in case)), whole, kernel="reference")
            single = errors(attend(case, whole, kernel=kernel), truth)
            for ranks in cp:
                layout, slots = Layout.zigzag(mask.n, ranks), max(ranks, SLOT_SHARDS)
                plan = Plan.build(mask, layout, schedule=schedule, slot_shards=slots)
                found.append(errors(attend(case, plan, kernel=kernel), truth) / single)
        means = torch.stack(found).unflatten(0, (seeds, len(cp))).mean(0).tolist()
        for ranks, each in zip(cp, means, strict=True):
            results.append({"mask": name, "cp": ranks, **dict(zip(PARTS, each, strict=True))})
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("--dtype", default="float32")
    dtype = parser.parse_args().dtype
    rows = ratios(kinds(2048), (2, 4, 8), dtype=dtype)
    print(json.dumps({**facts(), "dtype": dtype, "rows": rows}))
