"""Examines the job's own mask, attention, loss and gradients (the certificate) after Megatron has
made its parallel groups and before it builds the model, and the first microbatch before it trains.

`pretrain` is wrapped too, because it has the job's forward step as an argument.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import arguments_of
from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    import torch.distributed as dist
    from megatron.training import training

    setup, train, pretrain = training.setup_model_and_optimizer, training.train, training.pretrain
    given: dict[str, Any] = {}

    def examine(*more: Any) -> Any:
        from cp_ring.megatron.certificate.certify import certify  # imports Megatron

        return certify(training.get_args(), given.get("forward_step_func"), *more)

    @functools.wraps(setup)
    def certify_first(*args: Any, **kwargs: Any) -> Any:
        given["certificate"] = examine()
        if current().certify == "only":
            note("the certificate is made; nothing is trained (--cp-ring-certify only)")
            dist.barrier()
            sys.exit(0)
        return setup(*args, **kwargs)

    @functools.wraps(train)
    def certify_data(*args: Any, **kwargs: Any) -> Any:
        named = arguments_of(train, *args, **kwargs)
        examine(given.get("certificate"), named["train_data_iterator"])
        return train(*args, **kwargs)

    @functools.wraps(pretrain)
    def pretrain_with(*args: Any, **kwargs: Any) -> Any:
        given.update(arguments_of(pretrain, *args, **kwargs))
        return pretrain(*args, **kwargs)

    yield training, "setup_model_and_optimizer", certify_first
    yield training, "train", certify_data
    yield training, "pretrain", pretrain_with


PATCH = Patch(
    what="probes ring attention and the loss on the job's own ranks before the model is built "
    "(--cp-ring-certify)",
    why="Megatron's training loop has no hook between its parallel groups and the model",
    needed=lambda args, options: options.certifies and not args.program,
    replacements=_replacements,
)
