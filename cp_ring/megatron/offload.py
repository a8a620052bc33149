"""--cp-ring-offload: what attention layers save for backward waits in host memory; see `cp_ring.offload`.

A layer's out is also what its output projection saves. So the layer that holds both is linked: what `linear_proj` saves of out is
the copy in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.settings import current
from cp_ring.offload import Offload

_offload = Offload()


def offload() -> Offload:
    """Where all attention layers of this process keep their tensors."""
    return _offload


def saving(keep: Iterable[Tensor | None]) -> AbstractContextManager[None]:
    """The context of one call of attention: its saved tensors, except those of `keep`, wait in host memory.

    It does nothing while activations are recomputed, because the backward of such a call follows at once.
    """
    return _offload.layer(keep) if current().offload and torch.is_grad_enabled() and not _in_backward() else nullcontext()


def link(attention: Any) -> None:
    """Lets the output projection of an attention layer share the copies of its core attention, from the first call on.

    `linear_proj` and the core attention that stays are made later, by constructors of subclasses, so the first call adds hooks.
    """
    if not current().offload or getattr(attention, "_cp_ring_shares", False):
        return
    attention._cp_ring_shares = True
    added: list[Any] = []

    def add_hooks(layer: Any, *_: Any) -> None:
        _share(layer.linear_proj)
        added.pop().remove()

    added.append(attention.register_forward_pre_hook(add_hooks))


def _share(projection: torch.nn.Module) -> None:
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            entered.append(_offload.sharing())
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    projection.register_forward_pre_hook(enter)
    projection.register_forward_hook(leave, always_call=True)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
