"""Skips `make`, which Megatron runs in its own package folder at start-up to build the C++ index of
its data sets.

The wheel has the built module but no makefile. In a source checkout `make` needs pybind11; without
it Megatron exits in the middle of its own output.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from cp_ring.errors import ConfigError
from cp_ring.patches.patch import Patch


def _compile_where_possible(compile_helpers: Callable[[], None]) -> None:
    import megatron.core.datasets.utils as utils

    makefile = Path(utils.__file__).with_name("Makefile")
    if makefile.is_file() and importlib.util.find_spec("pybind11"):
        compile_helpers()
    elif importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise ConfigError(
            f"Megatron builds its index of data sets in {makefile.parent}, which needs the "
            "package pybind11: pip install pybind11"
        )


PATCH = Patch(
    what="runs `make` for the index of data sets only if there are a makefile and pybind11",
    why="the wheel has the built module but no makefile, a checkout needs pybind11, and Megatron "
    "exits at start-up when `make` fails",
    needed=lambda args, options: not args.program,
    wraps={"megatron.core.datasets.utils.compile_helpers": _compile_where_possible},
)
