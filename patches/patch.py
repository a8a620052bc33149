"""Defines `Patch`: a description, and replacements that are made all together or not at all.

A patch is written for functions of Megatron with certain parameters. `signatures.json` lists these
functions by patch, each with the parameters in the versions that cp_ring supports, and null for a
version without the function. A Megatron with others is rejected before anything is replaced.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError, one_line
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.compat import megatron_version
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import Function, around, loaded_modules, replaced
from cp_ring.runtime import RUNTIME

Replacement = tuple[Any, str, Any]  # owner, attribute, new value


@dataclass(kw_only=True)
class Patch:
    """A change to an installed package, made while the program runs.

    Attributes:
        what: the changed behavior, in one line.
        why: the reason, in one line.
        wraps: hooks `hook(original, ...)`, or their names, by the name of the function or method
            whose calls they get, as in `package.module.Class.method`; or classes in place of
            classes.
        replacements: yields other changes (owner, attribute, new value), and changes nothing
            itself. The owner must have the attribute. A function of a module of Megatron is
            replaced in all modules that hold it.
        name: that of the module, which `patches_by_name` sets.
        upstream: address of the upstream issue or pull request, or "".
        unneeded: returns why this installation needs no change, so that `apply` does nothing, or ""
            if it needs one.
        within: returns the context in which the process is while the patch is applied.
        needed: says whether a job of these flags and settings needs the patch; by default each job
            with --cp-ring does.
        order: patches with a lower number are applied first, and those of one number by name.
    """

    what: str
    why: str
    wraps: Mapping[str, Function | str] = field(default_factory=dict)
    replacements: Callable[[], Iterable[Replacement]] = lambda: ()
    name: str = ""
    upstream: str = ""
    unneeded: Callable[[], str] = lambda: ""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    needed: Callable[[Asked, Options], Any] = lambda args, options: options.enabled
    order: int = 1
    applied: bool = field(default=False, init=False)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def changes(self, elsewhere: bool = True) -> list[Replacement]:
        """Return (owner, attribute, new value) of everything that `apply` sets; without
        `elsewhere`, which takes longest, in the owners alone.
        """
        made = [*self.replacements()]
        for place, hook in self.wraps.items():
            owner_name, _, name = place.rpartition(".")
            owner = pkgutil.resolve_name(owner_name)
            hook = pkgutil.resolve_name(hook) if isinstance(hook, str) else hook
            new = hook if isinstance(hook, type) else around(hook)(getattr(owner, name))
            made += [(owner, name, new)]
        modules = loaded_modules("megatron") if elsewhere else []
        return [each for change in made for each in (change, *_held_elsewhere(*change, modules))]

    def apply(self) -> None:
        """Make every replacement, or none. Does nothing if the patch is already applied or
        `unneeded`.

        Raises `ConfigError` if the patch rejects the installed Megatron.
        """
        if self.applied or self.unneeded():
            return
        if problem := self.rejection():
            raise ConfigError(problem)
        with ExitStack() as stack:
            stack.enter_context(replaced(*self.changes()))
            stack.enter_context(self.within())
            self._undo = stack.pop_all()
        self.applied = True

    def revert(self) -> None:
        """Restore what `apply` replaced; do nothing if the patch is not applied."""
        self._undo.close()
        self.applied = False

    def rejection(self) -> str:
        """Return why the patch rejects the installed Megatron, or "". Imports what it replaces."""
        problem = ""
        try:
            self.changes(False)
        except (ImportError, AttributeError, TypeError) as error:
            problem = one_line(error)
        for function, known in signatures().get(self.name, {}).items():
            parameters = parameters_of(function)
            if parameters not in (*known, "", "(*args, **kwargs)"):  # a wrapper hides what it takes
                takes = f"takes {parameters}" if parameters else "does not exist"
                wanted = " or ".join(filter(None, known))
                problem = f"{function} {takes}, but the patch was written for {wanted}"
        return problem and f"patch {self.name}: megatron-core {megatron_version()}: {problem}"

    def state(self) -> str:
        """Return the state: applied, not applied, not needed (why), or rejected (why)."""
        if self.applied:
            return "applied"
        if reason := self.unneeded():
            return f"not needed: {reason}"
        problem = self.rejection()
        return f"rejected: {problem}" if problem else "not applied"


@RUNTIME.cache()
def signatures() -> dict[str, dict[str, list[str | None]]]:
    """Return the functions of Megatron that each patch replaces, with their accepted parameters."""
    return json.loads(Path(__file__).with_name("signatures.json").read_text())


def parameters_of(function: str) -> str | None:
    """Return the parameters of a function `module:name` without types and values, as in `(self, x,
    *, y=...)`; None if there is no such function, and "" if it is not Megatron's own, but that of
    who has replaced it before.
    """
    try:
        found = pkgutil.resolve_name(function)
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError):
        return None
    if not str(getattr(found, "__module__", "")).startswith("megatron."):
        return ""
    plain = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else ...
        )
        for each in parameters
    ]
    return str(inspect.Signature(plain)).replace("Ellipsis", "...")


def _held_elsewhere(owner: Any, name: str, value: Any, modules: list[Any]) -> list[Replacement]:
    """Return replacements of a function or class that the module `owner` defines in all others of
    `modules` that hold it, because one that ran `from x import name` has its own reference.
    """
    held = getattr(owner, name)
    if getattr(held, "__module__", "") != vars(owner).get("__name__"):
        return []
    return [(x, name, value) for x in modules if x is not owner and vars(x).get(name) is held]
