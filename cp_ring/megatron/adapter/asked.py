"""Reads Megatron's arguments, or the fields of its configuration, by name, and checks them.

Nothing heavy is imported here: flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cp_ring.errors import ConfigError

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


Check = Callable[[Asked, Any], str | None]
"""Returns one line `what is wrong: what to type` if the job of these arguments and settings cannot
run, else None.
"""


def reject_where(checks: Iterable[Check], args: Any, options: Any) -> None:
    """Raise `ConfigError` with the lines of all checks that reject the job."""
    asked = Asked(args)
    if lines := [line for check in checks if (line := check(asked, options))]:
        raise ConfigError(*lines)
