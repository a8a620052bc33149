"""What import-linter cannot say: the plan uses no part of torch.distributed."""

import ast
from pathlib import Path

import cp_ring.plan


def imported(file):
    """Full dotted names that a module imports or reaches as attributes of torch."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield f"torch.{node.attr}"


def test_plan_has_no_part_of_torch_distributed():
    files = sorted(Path(cp_ring.plan.__path__[0]).rglob("*.py"))
    assert len(files) > 3
    found = [
        (file.name, name)
        for file in files
        for name in imported(file)
        if name.startswith("torch.distributed")
    ]
    assert not found
