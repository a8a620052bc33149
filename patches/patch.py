"""Defines `Patch`: a description, a range of versions, and replacements that are made all together
or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.compat import SUPPORTED, megatron_version, within
from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import replaced

Replacement = tuple[Any, str, Any]  # owner, attribute, new value


@dataclass(kw_only=True)
class Patch:
    """A change to an installed package, made while the program runs.

    Attributes:
        name: the default is the name of the module that defines `replacements`.
        what: the changed behavior, in one line.
        why: the reason, in one line.
        replacements: yields (owner, attribute, new value); called once per `apply`. The owner must
            have the attribute.
        versions: the versions of megatron-core that the patch supports, as a PEP 440 specifier; the
            default is all versions that cp_ring supports.
        upstream: address of the upstream issue or pull request, or "".
        unneeded: returns why this installation needs no change, so that `apply` does nothing, or ""
            if it needs one.
        enter: called after the replacements are made.
        leave: called before the replacements are undone.
        needed: says whether a job of these flags and settings needs the patch; by default each job
            with --cp-ring does.
        order: patches with a lower number are applied first, and those of one number by name.
    """

    what: str
    why: str
    replacements: Callable[[], Iterable[Replacement]]
    name: str = ""
    versions: str = SUPPORTED
    upstream: str = ""
    unneeded: Callable[[], str] = lambda: ""
    enter: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    needed: Callable[[Asked, Options], Any] = lambda args, options: options.enabled
    order: int = 1
    applied: bool = field(default=False, init=False)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.replacements.__module__.rpartition(".")[2]

    def apply(self) -> None:
        """Make every replacement, or none. Does nothing if the patch is already applied or
        `unneeded`.

        Raises `ConfigError` if the installed version is outside `versions`, or an owner lacks an
        attribute.
        """
        if self.applied or self.unneeded():
            return
        if problem := self.rejection():
            raise ConfigError(problem)
        wanted = list(self.replacements())
        for owner, name, _ in wanted:
            if not hasattr(owner, name):
                raise ConfigError(
                    f"patch {self.name}: megatron-core {megatron_version()} has no "
                    f"{_label(owner)}.{name}"
                )
        self._undo.enter_context(replaced(*wanted))
        self.applied = True
        self.enter()

    def revert(self) -> None:
        """Restore what `apply` replaced; do nothing if the patch is not applied."""
        if not self.applied:
            return
        self.leave()
        self._undo.close()
        self.applied = False

    def rejection(self) -> str:
        """Return why the patch rejects the installed version, or ""."""
        version = megatron_version()
        if version is None:
            return f"patch {self.name}: megatron-core is not installed"
        if not within(self.versions, version):
            return (
                f"patch {self.name}: megatron-core {version} is installed, but the patch is for "
                f"{self.versions}"
            )
        return ""

    def state(self) -> str:
        """Return the state: applied, not applied, not needed (why), or rejected (why)."""
        if self.applied:
            return "applied"
        if reason := self.unneeded():
            return f"not needed: {reason}"
        problem = self.rejection()
        return f"rejected: {problem}" if problem else "not applied"

    def describe(self) -> dict[str, str]:
        """Return the patch as an entry of `cp_ring.patches.table()`."""
        return {
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "versions": f"megatron-core {self.versions}",
            "upstream": self.upstream,
            "state": self.state(),
        }


def replace_everywhere(modules: Iterable[Any], name: str, value: Any) -> list[Replacement]:
    """Return replacements of `name` in each module that has it, because a module that ran `from x
    import name` holds its own reference.
    """
    return [(module, name, value) for module in modules if hasattr(module, name)]


def _label(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__
