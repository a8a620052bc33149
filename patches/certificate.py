"""Examines the job's own mask, attention, loss and gradients (the certificate) after Megatron has
made its parallel groups and before it builds the model, and the first microbatch before it trains.

`pretrain` is wrapped too, because it has the job's forward step as an argument.
"""

from __future__ import annotations

import sys
from typing import Any

from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, arguments_of
from cp_ring.patches.patch import Patch
from cp_ring.runtime import RUNTIME

_TRAINING = "megatron.training.training"
_given: dict[str, Any] = RUNTIME.keep({})
"""The arguments of `pretrain`, and the certificate."""


def _remember(pretrain: Function, *args: Any, **kwargs: Any) -> Any:
    _given.update(arguments_of(pretrain, *args, **kwargs))
    return pretrain(*args, **kwargs)


def _certify_first(setup: Function, *args: Any, **kwargs: Any) -> Any:
    _given["certificate"] = _examine()
    if current().certify == "only":
        import torch.distributed as dist

        note("the certificate is made; nothing is trained (--cp-ring-certify only)")
        dist.barrier()
        sys.exit(0)
    return setup(*args, **kwargs)


def _certify_data(train: Function, *args: Any, **kwargs: Any) -> Any:
    named = arguments_of(train, *args, **kwargs)
    _examine(_given.get("certificate"), named["train_data_iterator"])
    return train(*args, **kwargs)


def _examine(*more: Any) -> Any:
    from megatron.training import get_args

    from cp_ring.megatron.certificate.certify import certify  # imports Megatron

    return certify(get_args(), _given.get("forward_step_func"), *more)


PATCH = Patch(
    what="probes ring attention and the loss on the job's own ranks before the model is built "
    "(--cp-ring-certify)",
    why="Megatron's training loop has no hook between its parallel groups and the model",
    needed=lambda args, options: options.certifies and not args.program,
    wraps={
        f"{_TRAINING}.pretrain": _remember,
        f"{_TRAINING}.setup_model_and_optimizer": _certify_first,
        f"{_TRAINING}.train": _certify_data,
    },
)
