"""The patches: one module for each place where cp_ring changes other code at run time.

Each module has one `PATCH`. Importing it applies nothing; `cp_ring.patches.install` applies the
patches that the flags ask for. `apply` makes all replacements of a patch or none, and `revert`
restores exactly what was there. `table` lists all patches.

Patch modules import Megatron, and modules of cp_ring that import it, only inside functions:
`cpu_runtime` must be applied before Megatron is imported, and the table must be quick.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.flags.checks_documents import splits_packed
from cp_ring.megatron.flags.layer_pattern import letters_of
from cp_ring.megatron.options import Options
from cp_ring.patches.patch import Patch


def _ring(args: Asked, options: Options) -> bool:
    return options.enabled


def _by_flags(args: Asked, options: Options) -> bool:
    return not args.program


def _recurrent(args: Asked, options: Options) -> bool:
    """Return True if layers may be recurrent. A program may have any layers, with tokens in another
    order or with documents.
    """
    moved = not options.named_layout.stock or options.document_mask or options.kinds or args.packed
    return options.enabled and bool(letters_of(args) or (args.program and moved))


FOR: dict[str, Callable[[Asked, Options], Any]] = {
    "cpu_runtime": lambda args, options: options.cpu,
    "dataset_helpers": _by_flags,
    "arguments": _by_flags,
    "optimizer_step": lambda args, options: True,
    "newest_checkpoint": lambda args, options: args.load,
    "exit_signal": lambda args, options: args.exit_signal_handler,
    "core_attention": _ring,
    "recompute": lambda args, options: options.enabled and options.recompute == "keep",
    "rotary_layout": lambda args, options: (
        options.enabled and (options.mask_kinds or not options.named_layout.stock)
    ),
    "recurrent_layers": _recurrent,
    "rotary_documents": lambda args, options: (
        options.enabled and (args.dataloader_inter_document_masking or splits_packed(args, options))
    ),
    "rotary_multimodal": _ring,
    "packed_batches": lambda args, options: options.enabled and splits_packed(args, options),
    "equal_rows": _ring,
    "document_mask": lambda args, options: (
        options.enabled and (options.document_mask or options.mask_kinds)
    ),
    "microbatch_order": lambda args, options: options.enabled and options.balance_microbatches,
    "loss_average": lambda args, options: options.enabled and not options.stock_loss_average,
    "loss_chunks": lambda args, options: options.enabled and options.loss_chunk,
    "mtp_roll": lambda args, options: options.enabled and args.mtp_num_layers,
    "moe_aux_loss": lambda args, options: options.enabled and args.num_experts,
    "megatron_fsdp": lambda args, options: options.enabled and args.use_megatron_fsdp,
    "certificate": lambda args, options: (
        options.enabled and not args.program and options.certify != "off"
    ),
    "model_checks": lambda args, options: args.program,
    "step_line": lambda args, options: False,  # `install.log_steps` applies this patch
}
"""For each patch, in the order in which patches are applied: a function that says whether a job
needs it.
"""

NAMES = tuple(FOR)


def get(name: str) -> Patch:
    """Return the patch called `name`; raise `ConfigError` for an unknown name."""
    if name not in NAMES:
        raise ConfigError(f"cp_ring has no patch {name!r}; it has {', '.join(NAMES)}")
    patch: Patch = importlib.import_module(f"cp_ring.patches.{name}").PATCH
    return patch


def apply_for(args: Asked, options: Options, names: Iterable[str] = NAMES) -> None:
    """Apply the patches that a job needs. Raises `ConfigError` if a patch rejects the installed
    package.
    """
    for name in names:
        if FOR[name](args, options):
            get(name).apply()


def table() -> list[dict[str, str]]:
    """Return one entry per patch: name, what, why, versions, upstream, state."""
    return [get(name).describe() for name in NAMES]


def applied() -> list[str]:
    """Return the names of the patches that are applied in this process."""
    return [name for name in NAMES if get(name).applied]
