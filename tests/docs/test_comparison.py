"""Each cell of cp_ring in docs/comparison.md is what the page of supported features, or a test,
knows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPARISON, SUPPORT = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("comparison", "support")
)

# A feature of the comparison: how the cell begins, and what holds it: words of a line of
# docs/support.md, or a test.
HELD = {
    "proven on GPUs": ("**no**", "written and bound to their signatures, **not run on a GPU**"),
    "algorithms": ("ring, owner to reader, relay", "tests/test_attention_masks.py"),
    "FP8 attention": ("no", "attention in fp8 (`fp8_dot_product_attention`"),
    "CUDA graphs with cp": ("written, not run on a GPU", "CUDA graphs that hold attention"),
    "causal, full": ("yes", "| causal |"),
    "sliding window": ("yes, moves only", "| window on alternate layers |"),
    "packed documents": ("yes, without padding", "packed without padding"),
    "prefix and other masks": ("any list of disjoint", "| global tokens |"),
    "sinks": ("yes", "| learnable sinks |"),
    "attention dropout": ("on the CPU", "| attention dropout |"),
    "queries and keys of different length": ("yes, in the function", "| keys of their own |"),
    "bias tensors": ("on the CPU, with gradients", "| bias tensors |"),
    "shards of unequal length": ("yes, in the function", "tests/test_attention_masks.py"),
    "load balance for any mask": ("yes", "| document mask balanced |"),
    "own attention kernel": ("no, uses installed ones", "tests/kernels"),
    "gradients of keys and values are added": ("in float32, at the owner", "tests/ops"),
    "receive memory": ("2 buffers, whatever cp is", "tests/comm"),
    "proof of a plan before it runs": ("yes", "tests/plan/test_properties.py"),
    "check of mask, loss and gradients at start": ("yes", "tests/certificate"),
    "runs on CPU ranks": ("yes, Megatron included", "| causal |"),
}


def cells() -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", COMPARISON, re.MULTILINE)
    return {name: cell for name, cell in rows if not cell.startswith("cp_ring")}


def test_every_feature_is_held_and_no_other():
    assert set(cells()) == set(HELD)


@pytest.mark.parametrize("feature", HELD)
def test_a_cell_says_what_is_supported(feature):
    begins, by = HELD[feature]
    cell = cells()[feature]
    assert cell.startswith(begins), (feature, cell)
    assert (ROOT / by).exists() if by.startswith("tests/") else by in SUPPORT, (feature, by)
