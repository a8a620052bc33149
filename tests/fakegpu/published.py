"""The signatures of functions that adapters of kernels call, read from what the package index has.

python -m tests.fakegpu.published      prints those that the tables in tests/kernels lack or have
otherwise
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fakegpu.build import Missing

TABLES = Path(__file__).resolve().parents[1] / "kernels"
OF_TE = "pytorch/cpp_extensions/fused_attn.py"
PUBLISHED = {
    **{
        f"2.{minor}": ("transformer_engine", f"transformer_engine==2.{minor}.*", OF_TE)
        for minor in range(14, 21)
    },
    **{
        f"3: flash-attn {version}": (
            "flash_attn",
            f"flash-attn=={version}.*",
            "hopper/flash_attn_interface.py",
        )
        for version in ("2.7.0", "2.7.4", "2.8.3")
    },
    "4: flash-attn 4.0.0b36": (
        "flash_attn",
        "flash-attn-4==4.0.0b36",
        "flash_attn/cute/interface.py",
    ),
}
"""By the label in a table, of which the newest of a minor version counts: the table, what the
package index has, and the file in it.
"""


def table(name: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((TABLES / f"{name}_signatures.json").read_text())
    return found


def labels(label: str) -> list[str]:
    """Those of a table that stand for the newest of a minor version, the newest first."""
    name, _, _ = PUBLISHED[label]
    return sorted((x for x in table(name) if x == label or x.startswith(f"{label}.")), reverse=True)


def source(requirement: str, path: str) -> str:
    """A file of a published package. Raises `Missing` where it cannot be had."""
    binary = "--no-binary" if requirement.startswith("flash-attn==") else "--only-binary"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", binary, ":all:"]
        command += ["--no-build-isolation", "--dest", folder, requirement]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise Missing(f"pip has no {requirement}: {ran.stderr.strip()[-200:]}")
        (archive,) = Path(folder).iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as opened:
                (name,) = (x for x in opened.namelist() if x.endswith(path))
                return opened.read(name).decode()
        with tarfile.open(archive) as sources:
            (member,) = (x for x in sources if x.name.split("/", 1)[-1] == path)
            file = sources.extractfile(member)
            assert file is not None
            return file.read().decode()


def signatures(text: str, names: set[str]) -> dict[str, str]:
    """Of functions of a module, without annotations, as the tables have them."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found[node.name] = " ".join(_words(node.args))
    return found


def constants(text: str, *names: str) -> list[Any]:
    """The values of constants of a module."""
    values = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in names
    }
    return [values[name] for name in names]


def function(text: str, name: str) -> Callable[..., Any]:
    """A function of a module that needs nothing of the module; without its decorators."""
    (node,) = (x for x in ast.parse(text).body if getattr(x, "name", "") == name)
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), name, "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def _words(arguments: ast.arguments) -> Iterator[str]:
    assert not (arguments.vararg or arguments.kwarg or arguments.posonlyargs)
    plain = [None] * (len(arguments.args) - len(arguments.defaults)), arguments.defaults
    for argument, default in zip(arguments.args, [*plain[0], *plain[1]], strict=True):
        yield _word(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _word(argument, default)


def _word(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return argument.arg
    return f"{argument.arg}={ast.unparse(default).replace(' ', '')}"


def differences(label: str) -> dict[str, tuple[str, str]]:
    """Functions whose published signature is not that of the table: (published, in the table)."""
    name, requirement, path = PUBLISHED[label]
    known = table(name)[(labels(label) or [label])[0]] if labels(label) else {}
    wanted = {x for each in table(name).values() for x in each}
    published = signatures(source(requirement, path), wanted)
    return {
        x: (words, known.get(x, "")) for x, words in published.items() if words != known.get(x, "")
    }


def main() -> None:
    for label in PUBLISHED:
        for name, (published, known) in differences(label).items():
            print(f"{label} {name}\n  published {published}\n  in table  {known}")


if __name__ == "__main__":
    main()
