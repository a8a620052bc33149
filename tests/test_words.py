"""One word, one thing: a row is a batch row, what is not supported is rejected, and a class name
names one class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("cp_ring", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

# Where `row` or `rows` means a batch row without the word batch: a pattern of such lines of a file.
_BATCH = r"in rows|zip\(rows|not rows|\(rows\)|one row|every row|row after row"
BATCH_ROWS = {
    "cp_ring/plan/layout.py":
    rf"rows: how many batch|\brows: int = 1|rows: Sequence\[Layout\]|self\.rows|{_BATCH}",
    "cp_ring/plan/mask_table.py": rf"rows: Sequence\[Self\]|{_BATCH}",
    "cp_ring/kernels/positional.py": r"layout\.rows",
    "cp_ring/plan/rank_plan.py": r"layout\.rows",
    "cp_ring/plan/plan.py": r"layout\.rows",
    "cp_ring/plan/routes.py": r"layout\.rows",
    "cp_ring/plan/costs/shapes.py": r"layout\.rows",
    "cp_ring/plan_cache.py": r"layout\.rows|`batch` rows",
    # Packing makes batch rows, and microbatches of them.
    "cp_ring/plan/packing.py": "",
    "cp_ring/megatron/data/sft.py": "",
    "cp_ring/megatron/data/balanced_sampler.py": "",
    # The key of the results in the JSON output, which scripts read.
    "cp_ring/tools/cli/bench.py": r'key: ClassVar\[str\] = "rows"',
}  # fmt: skip


def bare_rows(text: str, allowed: str = "(?!)") -> list[str]:
    """The lines in which `row` or `rows` does not follow the word batch; `batch` may end the line
    before.
    """
    text = re.sub(r'[Bb]atch\s*"?\s*[f#]?\s*"?\s*(?=rows?\b)', "batch ", text)
    return [
        line
        for line in text.splitlines()
        if re.search(r"(?<!batch )\brows?\b", line) and not re.search(allowed, line)
    ]


def test_a_row_is_a_batch_row():
    found = {file: bare_rows(text, BATCH_ROWS.get(file, "(?!)")) for file, text in FILES.items()}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_calls_are_supported_or_rejected():
    found = {
        file: re.findall(r"(?i).*(?:refus|(?<![a-z])serve[sd]?(?![a-z])).*", text)
        for file, text in FILES.items()
    }
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_class_name_names_one_class():
    homes = defaultdict(list)
    for file, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("for row in table:", 1),
        ("two batch rows", 0),
        ("Batch rows become heads.", 0),
        ("each batch\n    row", 0),
        ('"each batch "\n    "row"', 0),
        ("table.add_row()", 0),
    ],
)
def test_the_rule_of_rows_itself(text, bare):
    assert len(bare_rows(text)) == bare
