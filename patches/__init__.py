"""The patches: one module for each place where cp_ring changes other code at run time.

Each module has one `PATCH`. Importing it applies nothing; `cp_ring.patches.install` applies the
patches that the flags ask for. `apply` makes all replacements of a patch or none, and `revert`
restores exactly what was there. `table` lists all patches.

Patch modules import Megatron, and modules of cp_ring that import it, only inside functions:
`cpu_runtime` must be applied before Megatron is imported, and the table must be quick.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.options import Options
from cp_ring.patches.patch import Patch

_FIRST = (
    "cpu_runtime",
    "dataset_helpers",
    "arguments",
    "optimizer_step",
    "newest_checkpoint",
    "exit_signal",
    "core_attention",
    "recompute",
    "rotary_layout",
    "recurrent_layers",
    "rotary_documents",
    "rotary_multimodal",
    "packed_batches",
    "equal_rows",
    "document_mask",
    "microbatch_order",
    "loss_average",
    "loss_chunks",
    "mtp_roll",
    "moe_aux_loss",
    "megatron_fsdp",
    "certificate",
    "model_checks",
    "step_line",
)
_HELPERS = {"enable", "install", "patch"}
_OTHERS = {module.name for module in pkgutil.iter_modules(__path__)} - {*_FIRST, *_HELPERS}
NAMES = (*_FIRST, *sorted(_OTHERS))
"""Names in the order in which they are applied."""


def get(name: str) -> Patch:
    """The patch called `name`; raises `ConfigError` for an unknown name."""
    if name not in NAMES:
        raise ConfigError(f"cp_ring has no patch {name!r}; it has {', '.join(NAMES)}")
    patch: Patch = importlib.import_module(f"cp_ring.patches.{name}").PATCH
    return patch


def apply_for(args: Asked, options: Options, names: Iterable[str] = NAMES) -> None:
    """Applies the patches that a job needs. Raises `ConfigError` where one rejects what is
    installed.
    """
    for patch in map(get, names):
        if patch.when(args, options):
            patch.apply()


def table() -> list[dict[str, str]]:
    """One entry per patch: name, what, why, versions, upstream, state."""
    return [get(name).describe() for name in NAMES]


def applied() -> list[str]:
    """Names of the patches that are applied in this process."""
    return [name for name in NAMES if get(name).applied]
