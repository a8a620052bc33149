"""Keeps Megatron from running `make` for its C++ data set index where there is no makefile.

Megatron runs `make` in its own package folder at start-up. The wheel has the built module but no
makefile. In a source checkout, which has one, nothing is changed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from cp_ring.patches.patch import Patch, Replacement


def _unneeded() -> str:
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "core" / "datasets" / "Makefile").is_file():
            return "this Megatron has a makefile"
    return ""


def _replacements() -> Iterator[Replacement]:
    import megatron.core.datasets.utils as utils

    compile_helpers = utils.compile_helpers

    def compile_unless_built() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    yield utils, "compile_helpers", compile_unless_built


PATCH = Patch(
    what="does not run `make` for the data set index where the built module is present",
    why="the wheel has the built module but no makefile, and Megatron exits at start-up when "
    "`make` fails",
    when="!program",
    replacements=_replacements,
    unneeded=_unneeded,
)
