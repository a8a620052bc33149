"""Checks the configuration of a model before it is built, and makes the certificate before the
first one is.

For programs without a command line: `cp_ring.megatron.enable` applies it. The constructor of
`LanguageModule` runs before any layer of a `GPTModel` or a `HybridModel` is built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule

    constructor = LanguageModule.__init__

    def attends_to_own_tokens(config: Any) -> bool:
        """Whether a model, such as an encoder, is no part of the job's context parallelism, for
        which the settings are.
        """
        cp = (
            parallel_state.get_context_parallel_world_size()
            if parallel_state.model_parallel_is_initialized()
            else 1
        )
        return cp > 1 and config.context_parallel_size == 1

    @functools.wraps(constructor)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from cp_ring.megatron.program import accept_model, certify_model
        from cp_ring.megatron.rejection import note
        from cp_ring.megatron.settings import current
        from cp_ring.patches.install import install_for_model

        if attends_to_own_tokens(config):
            note(
                f"{type(self).__name__}: its configuration has context_parallel_size 1, so each "
                "rank attends to its own tokens"
            )
            constructor(self, config, *args, **kwargs)
            return
        accepted = accept_model(config)
        install_for_model(accepted, current())
        certify_model(accepted)
        constructor(self, config, *args, **kwargs)

    yield LanguageModule, "__init__", construct


PATCH = Patch(
    what="cp_ring.megatron.enable: checks the configuration of each model before it is built, and "
    "probes attention once",
    why="programs that build models themselves have no command line to check, and no other place "
    "that all of them pass",
    when="program",
    replacements=_replacements,
)
