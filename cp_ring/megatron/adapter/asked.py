"""Reads Megatron's arguments, or the fields of its configuration, by name.

Nothing heavy is imported here: flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

from typing import Any

_FLAGS = {"fp8": "fp8-format", "fp4": "fp4-format"}  # arguments whose flag has another name


class Asked:
    """Megatron's parsed arguments, the fields of a `TransformerConfig`, or the words of a command
    line. An argument that is missing there is None.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, None)

    @property
    def tp(self) -> int:
        """Return the tensor-parallel size."""
        return self.tensor_model_parallel_size or 1

    @property
    def cp(self) -> int:
        """Return the context-parallel size."""
        return self.context_parallel_size or 1

    def first(self, *names: str) -> str:
        """Return the flag of the first of these arguments that is given, or ""."""
        return next((_flag(name) for name in names if getattr(self, name)), "")

    def shown(self, name: str) -> str:
        """Return the flag of an argument with its value, such as `--lr 0.1`."""
        value = getattr(self, name)
        return f"{_flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _flag(name: str) -> str:
    return "--" + _FLAGS.get(name, name).replace("_", "-")
