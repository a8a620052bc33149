"""The patches: one module for each place where cp_ring changes other code at run time.

Each module has one `PATCH`, which also says which jobs need it. Importing it applies nothing;
`cp_ring.patches.install` applies the patches that the flags ask for. `apply` makes all replacements
of a patch or none, and `revert` restores exactly what was there. `table` lists all patches.

Patch modules import Megatron, and modules of cp_ring that import it, only inside functions:
`cpu_runtime` must be applied before Megatron is imported, and the table must be quick.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.compat import development
from cp_ring.megatron.options import Options
from cp_ring.patches.patch import Patch
from cp_ring.runtime import RUNTIME

_OTHERS = {"patch", "install", "enable"}  # modules that hold no patch


@RUNTIME.cache()
def patches_by_name() -> dict[str, Patch]:
    """Return all patches by name, in the order in which they are applied."""
    modules = {module.name for module in pkgutil.iter_modules(__path__)} - _OTHERS
    patches: list[Patch] = []
    for name in modules:
        patches.append(importlib.import_module(f"{__name__}.{name}").PATCH)
        patches[-1].name = name
    return {patch.name: patch for patch in sorted(patches, key=lambda it: (it.order, it.name))}


def get(name: str) -> Patch:
    """Return the patch called `name`; raise `ConfigError` for an unknown name."""
    if name not in patches_by_name():
        raise ConfigError(f"cp_ring has no patch {name!r}; it has {', '.join(patches_by_name())}")
    return patches_by_name()[name]


def apply_for(args: Asked, options: Options, names: Iterable[str] = ()) -> None:
    """Apply the patches that a job needs, or those of `names` that it needs, and choose plans by
    the rates of this rank's GPU from now on. Raises `ConfigError` if a patch rejects the installed
    package; then no patch was applied.
    """
    import torch  # slow

    from cp_ring.comm.groups import choose_for

    needed = [
        patch for name in names or patches_by_name() if (patch := get(name)).needed(args, options)
    ]
    if problems := [x for patch in needed if (x := patch.state()).startswith("rejected: ")]:
        raise ConfigError(*(problem.removeprefix("rejected: ") for problem in problems))
    for patch in needed:
        patch.apply()
    if said := development():
        note(said)
    choose_for(torch.device("cuda"))  # ranks without attention layers split batches too


def table() -> list[dict[str, str]]:
    """Return one entry per patch: name, what, why, upstream, state."""
    return [
        {
            **{told: getattr(patch, told) for told in ("name", "what", "why", "upstream")},
            "state": patch.state(),
        }
        for patch in patches_by_name().values()
    ]


def applied() -> list[str]:
    """Return the names of the patches that are applied in this process."""
    return [name for name, patch in patches_by_name().items() if patch.applied]
