"""Checks the configuration of a model before it is built, and makes the certificate before the
first model is built.

`cp_ring.megatron.enable` applies it, for programs without a command line. The constructor of
`LanguageModule` runs before any layer of a `GPTModel` or a `HybridModel` is built.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed

from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch


def _construct(
    constructor: Function,
    self: Any,
    config: Any,
    *args: Any,
    pg_collection: Any = None,
    **kwargs: Any,
) -> None:
    from cp_ring.megatron.adapter.documents import ALONE
    from cp_ring.megatron.adapter.notes import note
    from cp_ring.megatron.program import accept_model, certify_model
    from cp_ring.megatron.settings import current
    from cp_ring.patches.install import install_for_model

    ranks = _ranks_of(pg_collection)
    name = type(self).__name__
    alone = config.context_parallel_size == 1 < len(ranks)
    if not alone:
        accepted = accept_model(config)
        install_for_model(accepted, current())
        certify_model(accepted, name, own_group=ranks != _ranks_of(None))
    constructor(self, config, *args, pg_collection=pg_collection, **kwargs)
    if alone:
        note(
            f"{name}: its configuration has context_parallel_size 1, so each rank attends to its "
            "own tokens"
        )
        # its rotary embeddings are also for its own tokens only
        self.pg_collection = copy.copy(self.pg_collection)
        self.pg_collection.cp = self.cp_group = ALONE


def _ranks_of(collection: Any) -> list[int]:
    """Return the context-parallel ranks of a pg_collection, or of Megatron's global groups if it is
    None.
    """
    from megatron.core import parallel_state

    from cp_ring.megatron.adapter import compat

    if collection is None and not parallel_state.model_parallel_is_initialized():
        return [0]
    return torch.distributed.get_process_group_ranks(compat.group_of(collection, "cp"))


PATCH = Patch(
    what="checks the configuration of each model before it is built, and probes attention once "
    "(cp_ring.megatron.enable)",
    why="programs that build their models themselves have no command line to check, and only the "
    "constructors of models are common to all of them",
    needed=lambda args, options: args.program,
    wraps={
        "megatron.core.models.common.language_module.language_module."
        "LanguageModule.__init__": _construct
    },
)
