"""The size of the code by room, and whether each keeps its budget. Run: python launch/budget.py

A token is an operator, a name, a number or a string, as Python's tokenizer counts them. Comments,
blank lines and indentation are free. A room is a part of the code with one purpose; what it may
hold is its budget, and what it may hold today is its limit. A change may not raise a room above
its limit, and one that lowers a room lowers the limit too. The exit code is 1 if a limit is
exceeded, if a file is in no room or in several, if a line has more than 100 columns, or if a module
keeps state outside of `cp_ring.runtime`.
"""

from __future__ import annotations

import ast
import sys
import token
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = {token.OP, token.NAME, token.NUMBER, token.STRING}
COUNTED |= {token.FSTRING_START, token.FSTRING_MIDDLE, token.FSTRING_END}
COLUMNS = 100
DENSITY = 10.1  # tokens a code line
# What a module may make once without keeping state:
NO_STATE = {"frozenset", "tuple", "range", "compile", "getLogger", "TypeVar", "Path", "Typer"}
NO_STATE |= {"Lock", "RLock", "ContextVar", "LayerOfFlags", "Console"}
# Case tables of other libraries are not counted:
TABLES = ("tests/peers/tables.py", "tests/peers/gym.py")


@dataclass(frozen=True)
class Room:
    """A part of the code: `paths` are files and folders below the root of the repository."""

    name: str
    budget: int
    limit: int
    paths: tuple[str, ...]


def room(name: str, budget: int, limit: int, paths: str) -> Room:
    return Room(name, budget, limit, tuple(paths.split()))


_LIBRARY = """cp_ring/__init__.py cp_ring/errors.py cp_ring/runtime.py cp_ring/api.py
    cp_ring/plan_cache.py cp_ring/attention.py cp_ring/inputs.py cp_ring/hop_loop.py
    cp_ring/sharding.py cp_ring/prefixes.py cp_ring/options.py cp_ring/cuts.py
    cp_ring/plan cp_ring/memory.py cp_ring/kernels cp_ring/comm cp_ring/ops cp_ring/observe cp_ring/recurrent
    cp_ring/integrations cp_ring/testing"""
_ADAPTER = "cp_ring/megatron patches cp_ring/run.py cp_ring/pretrain_gpt.py"
ROOMS = (
    room("one call of attention", 8_500, 8_450, """cp_ring/__init__.py cp_ring/errors.py
        cp_ring/runtime.py cp_ring/api.py cp_ring/plan_cache.py cp_ring/attention.py
        cp_ring/inputs.py cp_ring/hop_loop.py"""),
    room("shards, prefixes, settings", 4_400, 4_250, """cp_ring/sharding.py cp_ring/prefixes.py
        cp_ring/options.py cp_ring/cuts.py"""),
    room("plans and proofs", 40_000, 39_990, "cp_ring/plan cp_ring/memory.py"),
    room("kernels", 16_500, 16_420, "cp_ring/kernels"),
    room("messages", 12_500, 12_490, "cp_ring/comm"),
    room("merges and sums", 5_300, 5_790, "cp_ring/ops"),
    room("recurrent layers", 5_500, 5_520, "cp_ring/recurrent"),
    room("observation", 4_500, 4_530, "cp_ring/observe"),
    room("other libraries, testing", 10_000, 10_070, "cp_ring/integrations cp_ring/testing"),
    room("adapter", 11_000, 15_810, """cp_ring/megatron/adapter cp_ring/megatron/specs.py
        cp_ring/megatron/wrapping.py"""),
    room("data", 10_500, 7_780, "cp_ring/megatron/data cp_ring/megatron/batches.py"),
    room("flags", 7_000, 7_180, "cp_ring/megatron/flags cp_ring/megatron/rejection.py"),
    room("how a job ends", 1_200, 1_130, """cp_ring/megatron/ending.py
        cp_ring/megatron/progress.py cp_ring/megatron/signals.py"""),
    room("training", 8_000, 8_230, """cp_ring/run.py cp_ring/pretrain_gpt.py
        cp_ring/megatron/__init__.py cp_ring/megatron/compat.py cp_ring/megatron/gpt.py
        cp_ring/megatron/gpt_model.py cp_ring/megatron/loss_chunks.py cp_ring/megatron/next_tokens.py
        cp_ring/megatron/program.py
        cp_ring/megatron/step_timing.py
        cp_ring/megatron/validation.py"""),
    room("options and choices", 4_000, 2_300, """cp_ring/megatron/option_values.py
        cp_ring/megatron/options.py cp_ring/megatron/settings.py"""),
    room("checkpoints", 1_000, 830, "cp_ring/megatron/newest_checkpoint.py"),
    room("certificate", 15_500, 15_550, "cp_ring/megatron/certificate"),
    room("patches", 10_000, 9_720, "patches"),
    room("train", 3_500, 3_930, """cp_ring/tools/train.py cp_ring/tools/job.py
        cp_ring/tools/megatron_flags.py"""),
    room("corpus", 1_500, 1_680, "cp_ring/tools/corpus.py"),
    room("plan", 3_000, 3_730, "cp_ring/tools/plan.py cp_ring/tools/lengths.py"),
    room("draw", 1_800, 1_850, "cp_ring/tools/draw.py"),
    room("tune", 7_000, 7_260, "cp_ring/tools/tune.py cp_ring/tools/tune_model.py"),
    room("doctor", 1_200, 1_200, "cp_ring/tools/doctor.py"),
    room("bench", 3_000, 2_190, """cp_ring/tools/bench.py
        cp_ring/tools/bench_attention.py cp_ring/tools/bench_host.py"""),
    room("glue", 1_000, 1_040, """cp_ring/tools/__init__.py cp_ring/tools/__main__.py
        cp_ring/tools/cli.py cp_ring/tools/terminal.py"""),
)  # fmt: skip
"""The rooms. Each file of the source is in exactly one."""
SUMS = (
    room("ring 1: the library", 107_000, 107_470, _LIBRARY),
    room("ring 2: Megatron", 67_000, 68_500, _ADAPTER),
    room("ring 3: tools", 22_000, 22_840, "cp_ring/tools"),
    room("all", 196_000, 198_800, "cp_ring patches"),
    room("tests", 220_000, 257_770, "tests"),
)
"""Several rooms together, and the tests."""


@cache
def tokens(path: str) -> int:
    with open(ROOT / path) as file:
        return sum(each.type in COUNTED for each in tokenize.generate_tokens(file.readline))


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


def code_lines(path: str) -> int:
    """Lines with a token that is no docstring."""
    found: set[int] = set()
    with open(ROOT / path) as file:
        for each in tokenize.generate_tokens(file.readline):
            docstring = each.type == token.STRING and each.line.strip().startswith('"""')
            if each.type in COUNTED and not docstring:
                found |= {*range(each.start[0], each.end[0] + 1)}
    return len(found)


def files(*paths: str) -> list[str]:
    """The Python files at or below the paths, from the root of the repository."""
    found = [ROOT / path for path in paths]
    every = [file for path in found for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sorted(
        {str(file.relative_to(ROOT)) for file in every if "__pycache__" not in file.parts}
    )


def size(paths: tuple[str, ...]) -> int:
    return sum(tokens(path) for path in files(*paths) if path not in TABLES)


def misplaced() -> Iterator[str]:
    """Files of the source that are in no room, or in several."""
    rooms = [name for each in ROOMS for name in files(*each.paths)]
    for path in files("cp_ring", "patches"):
        if rooms.count(path) != 1:
            yield f"{path} is in {rooms.count(path)} rooms"


def _name(node: ast.expr) -> str:
    """The function that an expression calls, without its module."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def state(path: str) -> Iterator[str]:
    """What the module keeps for the whole process without `cp_ring.runtime`: objects, containers,
    caches, globals.
    """
    tree = ast.parse(text(path))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            kept = isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.Call)
            constant = target.isupper() or target.startswith("__") or _name(node.value) in NO_STATE
            if kept and not constant and not ast.unparse(node.value).startswith("RUNTIME."):
                yield f"{path}:{node.lineno} {target}"
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                cached = _name(decorator) in ("cache", "lru_cache")
                if cached and not ast.unparse(decorator).startswith("RUNTIME."):
                    yield f"{path}:{node.lineno} {node.name}"
    for each in ast.walk(tree):
        if isinstance(each, ast.Global):
            yield f"{path}:{each.lineno} global {', '.join(each.names)}"


def long_lines(path: str) -> Iterator[str]:
    for number, line in enumerate(text(path).splitlines(), 1):
        if len(line.partition("  # type: ignore")[0]) > COLUMNS:
            yield f"{path}:{number}"


def main() -> int:
    source = files("cp_ring", "patches")
    print(f"{'room':<44}{'budget':>9}{'now':>9}{'limit':>9}")
    over = False
    for each in (*ROOMS, *SUMS):
        now = size(each.paths)
        over |= now > each.limit
        mark = "  OVER" if now > each.limit else ""
        print(f"{each.name:<44}{each.budget:>9,}{now:>9,}{each.limit:>9,}{mark}")
    density = sum(map(tokens, source)) / sum(map(code_lines, source))
    print(f"{'tokens a code line':<44}{DENSITY:>9}{density:>9.2f}{DENSITY:>9}")
    faults = [where for path in source for where in (*state(path), *long_lines(path))]
    faults += misplaced()
    for where in faults:
        print(f"not allowed: {where}")
    return 1 if over or faults or density > DENSITY else 0


if __name__ == "__main__":
    sys.exit(main())
