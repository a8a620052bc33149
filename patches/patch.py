"""What a patch is: a description, a version range, and replacements that are made all together or not at all."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from cp_ring.errors import ConfigError
from cp_ring.megatron.compat import megatron_version

Replacement = tuple[Any, str, Any]  # owner, attribute, new value

_MISSING = object()


@dataclass
class Patch:
    """A change to an installed package, made at run time.

    Attributes:
        name: the module's name.
        what: what it changes, one line.
        why: why, one line.
        package: the distribution it changes.
        versions: the versions that it was written for, as a PEP 440 specifier.
        replacements: yields (owner, attribute, new value); called once per `apply`. The owner must have the attribute.
        upstream: address of the upstream issue, or "".
        unneeded: a reason why nothing has to be changed here, or "" (then `apply` changes nothing).
        enter, leave: called after the replacements are made, and before they are undone.
    """

    name: str
    what: str
    why: str
    package: str
    versions: str
    replacements: Callable[[], Iterable[Replacement]]
    upstream: str = ""
    unneeded: Callable[[], str] = lambda: ""
    enter: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    applied: bool = field(default=False, init=False)
    _saved: list[Replacement] = field(default_factory=list, init=False)

    def apply(self) -> None:
        """Makes every replacement, or none; does nothing where it is in force already, or unneeded.

        Raises `ConfigError` if the installed version is outside `versions`, or lacks what is to be replaced.
        """
        if self.applied or self.unneeded():
            return
        problem = self.rejection()
        if problem:
            raise ConfigError(problem)
        wanted = list(self.replacements())
        for owner, name, _ in wanted:
            if not hasattr(owner, name):
                raise ConfigError(f"patch {self.name}: {self.package} {_version(self.package)} has no {_label(owner)}.{name}")
        for owner, name, value in wanted:
            self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)
        self.applied = True
        self.enter()

    def revert(self) -> None:
        """Restores what `apply` replaced; does nothing if the patch is not in force."""
        if not self.applied:
            return
        self.leave()
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self.applied = False

    def rejection(self) -> str:
        """Why the patch cannot be applied to the installed version, or ""."""
        version = _version(self.package)
        if version is None:
            return f"patch {self.name}: {self.package} is not installed"
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            return f"patch {self.name}: {self.package} {version} is installed, but the patch is for {self.versions}"
        return ""

    def state(self) -> str:
        """One word or line: applied, not applied, not needed (why), or refused (why)."""
        if self.applied:
            return "applied"
        reason = self.unneeded()
        if reason:
            return f"not needed: {reason}"
        problem = self.rejection()
        return f"refused: {problem}" if problem else "not applied"

    def row(self) -> dict[str, str]:
        """The patch as a row of `cp_ring.patches.table()`."""
        return {
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "versions": f"{self.package} {self.versions}",
            "upstream": self.upstream,
            "state": self.state(),
        }


def replace_everywhere(modules: Iterable[Any], name: str, value: Any) -> list[Replacement]:
    """Replacements of `name` in each module that has it: modules that did `from x import name` hold their own reference."""
    return [(module, name, value) for module in modules if hasattr(module, name)]


def _version(package: str) -> str | None:
    return megatron_version() if package == "megatron-core" else _distribution_version(package)


def _distribution_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _label(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__
