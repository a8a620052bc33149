"""The size of the code by package, and whether it keeps its budget. Run: python launch/budget.py
[NAME OF A ROW ...]

A token is an operator, a name, a number or a string, as Python's tokenizer counts them. Comments,
blank lines and indentation are free. `TABLE` has the goals, and the limits of today: a change may
not raise a number above its limit, unless it adds a feature and says so, and a change that lowers
one lowers its limit too. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import ast
import sys
import token
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = {token.OP, token.NAME, token.NUMBER, token.STRING}
COUNTED |= {token.FSTRING_START, token.FSTRING_MIDDLE, token.FSTRING_END}
# One file a probe, a kernel, a patch:
MANY_FILES = {"cp_ring/megatron/certificate", "cp_ring/kernels", "patches"}
NO_STATE = {"frozenset", "tuple", "range", "compile", "getLogger", "TypeVar", "Path", "Typer"}
NO_STATE |= {"Lock", "RLock", "ContextVar", "LayerOfFlags"}
# The parameters are those of another function, or of a kernel on a GPU:
GIVEN = {"overload", "override", "jit"}
# Those of the protocols `AttentionKernel`, `VarlenKernel` and `KernelCall`:
KERNEL = {"backward", "backward_varlen", "gradients"}

# What is counted: (goal, limit). Each is a number over all of cp_ring and patches, but for the
# last, which is of tests.
TABLE = {
    "tokens": (225_000, 354_400),
    "tokens a code line, times 100": (1_000, 981),
    "packages of more than 16 files": (0, 0),
    "files of more than 450 lines": (0, 0),
    "files with the name of another": (0, 0),
    "lines of more than 100 columns": (0, 0),
    "functions of more than 7 parameters": (0, 0),
    "modules that import more than 12 others": (0, 2),
    "state outside of cp_ring.runtime": (0, 0),
    "tokens of tests": (212_000, 389_700),  # the goal: 22,000 lines of 130 columns
}


@dataclass(frozen=True)
class File:
    path: str  # from the root of the repository

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        with open(ROOT / self.path) as file:
            return [
                each for each in tokenize.generate_tokens(file.readline) if each.type in COUNTED
            ]

    @cached_property
    def code_lines(self) -> int:
        """Lines with a token that is no docstring."""
        code = (
            each
            for each in self.tokens
            if not (each.type == token.STRING and each.line.strip().startswith('"""'))
        )
        return len({line for each in code for line in range(each.start[0], each.end[0] + 1)})

    @property
    def package(self) -> str:
        return str(Path(self.path).parent)

    @cached_property
    def imports(self) -> set[str]:
        """Modules of cp_ring that the file imports anywhere, but for type checking."""
        nodes = set(ast.walk(self.tree))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                nodes -= set(ast.walk(node))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {
            name.name for node in nodes if isinstance(node, ast.Import) for name in node.names
        }
        return {name for name in names if name.split(".")[0] == "cp_ring"}

    @cached_property
    def wide_functions(self) -> list[str]:
        """Functions of more than 7 parameters, without self, cls and ctx."""
        found = []
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = {each.arg for each in every} - {"self", "cls", "ctx"}
            given = GIVEN & {_last_name(each) for each in node.decorator_list}
            if "kernels" in self.package and node.name in KERNEL:
                continue
            if len(names) > 7 and not given:
                found.append(f"{self.path}:{node.lineno} {node.name} ({len(names)})")
        return found

    @cached_property
    def state(self) -> list[str]:
        """What the module keeps for the whole process without `cp_ring.runtime`: objects,
        containers, caches, globals.
        """
        found = []
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = ast.unparse(
                    node.targets[0] if isinstance(node, ast.Assign) else node.target
                )
                kept = isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.Call)
                constant = (
                    target.isupper()
                    or target.startswith("__")
                    or _last_name(node.value) in NO_STATE
                )
                if kept and not constant and not _registered(node.value):
                    found.append(f"{self.path}:{node.lineno} {target}")
            elif isinstance(node, ast.FunctionDef):
                caches = [
                    each
                    for each in node.decorator_list
                    if _last_name(each) in ("cache", "lru_cache")
                ]
                found += [
                    f"{self.path}:{node.lineno} {node.name}"
                    for each in caches
                    if not _registered(each)
                ]
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Global)]
        return found + [
            f"{self.path}:{node.lineno} global {', '.join(node.names)}" for node in nodes
        ]


def _last_name(node: ast.expr) -> str:
    """The function that an expression calls, without its module; that of a decorator with or
    without arguments.
    """
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def _registered(node: ast.expr) -> bool:
    return ast.unparse(node).startswith("RUNTIME.")


def files_of(*folders: str) -> list[File]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [File(str(path.relative_to(ROOT))) for path in paths if "__pycache__" not in path.parts]


def measure(files: list[File], tests: list[File]) -> dict[str, tuple[int, list[str]]]:
    """Of each name in `TABLE`: the number, and where it comes from."""
    names = Counter(Path(file.path).name for file in files)
    in_package = Counter(file.package for file in files)
    tokens = sum(len(file.tokens) for file in files)
    crowded = [name for name, n in in_package.items() if n > 16 and name not in MANY_FILES]
    twice = [
        file.path for file in files if names[Path(file.path).name] > 1 and "__" not in file.path
    ]
    lists = {
        "packages of more than 16 files": crowded,
        "files of more than 450 lines": [file.path for file in files if len(file.lines) > 450],
        "files with the name of another": twice,
        "lines of more than 100 columns": [
            f"{file.path}:{number}"
            for file in files
            for number, line in enumerate(file.lines, 1)
            if len(line.partition("  # type: ignore")[0]) > 100
        ],
        "functions of more than 7 parameters": [
            where for file in files for where in file.wide_functions
        ],
        "modules that import more than 12 others": [
            file.path for file in files if len(file.imports) > 12
        ],
        "state outside of cp_ring.runtime": [where for file in files for where in file.state],
    }
    return {
        "tokens": (tokens, []),
        "tokens a code line, times 100": (
            round(100 * tokens / sum(file.code_lines for file in files)),
            [],
        ),
        **{name: (len(places), places) for name, places in lists.items()},
        "tokens of tests": (sum(len(file.tokens) for file in tests), []),
    }


def main() -> int:
    files = files_of("cp_ring", "patches")
    packages: dict[str, list[File]] = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    print(f"{'package':<32}{'files':>6}{'lines':>8}{'tokens':>9}{'a line':>8}")
    for name, members in packages.items():
        lines = sum(len(file.lines) for file in members)
        tokens = sum(len(file.tokens) for file in members)
        dense = tokens / max(1, sum(file.code_lines for file in members))
        print(f"{name:<32}{len(members):>6}{lines:>8}{tokens:>9}{dense:>8.1f}")
    print(f"\n{'budget':<44}{'goal':>9}{'now':>9}{'limit':>9}")
    measured = measure(files, files_of("tests"))
    over = [name for name, (_, limit) in TABLE.items() if measured[name][0] > limit]
    for name, (goal, limit) in TABLE.items():
        number, places = measured[name]
        print(f"{name:<44}{goal:>9}{number:>9}{limit:>9}" + ("  OVER" if name in over else ""))
        if name in over or name in sys.argv[1:]:
            print("".join(f"    {place}\n" for place in places), end="")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
