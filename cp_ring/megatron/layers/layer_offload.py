"""What attention layers save for backward waits in host memory: by --cp-ring-offload
(`cp_ring.offload`), or by Megatron.

A layer's out is also what its output projection saves. So with --cp-ring-offload the layer that
holds both is linked: what `linear_proj` saves of out is the copy in host memory.

Megatron's own ways are hooks for saved tensors around a layer or a part of it: fine-grained
offloading, and that of TransformerEngine (--cpu-offloading-num-layers). Both leave tensors that are
marked as not to be moved. TransformerEngine before 2.10, or with NVTE_CPU_OFFLOAD_V1=1, moves only
tensors that are marked, as its own attention marks them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import before_first_call
from cp_ring.runtime import RUNTIME

if TYPE_CHECKING:
    from cp_ring.offload import Offload


@RUNTIME.cache()
def offload() -> Offload:
    """Where all attention layers of this process keep their tensors."""
    from cp_ring.offload import Offload

    return Offload()


def saving(keep: Iterable[Tensor | None], config: Any = None) -> AbstractContextManager[Any]:
    """The context of one call of attention: its saved tensors, except those of `keep`, wait in host
    memory.

    config: that of the layer, which holds the context of TransformerEngine's offloading.
    It does nothing while activations are recomputed, because the backward of such a call follows at
    once.
    """
    kept = [x for x in keep if x is not None]
    for x in kept:
        x._TE_do_not_offload = True  # type: ignore[attr-defined]
    if not torch.is_grad_enabled() or in_backward():
        return nullcontext()
    context = getattr(config, "_cpu_offloading_context", None)
    if hasattr(context, "on_save_for_backward"):
        return _marked(kept, context)
    return offload().layer(kept) if current().offload else nullcontext()


def _marked(keep: Iterable[Tensor], context: Any) -> saved_tensors_hooks:
    """The hooks of `context`, TransformerEngine's, which get tensors marked as to be moved, except
    those of `keep`.
    """
    stay = {x.data_ptr() for x in keep}

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() not in stay:
            tensor.activation_offloading = True  # type: ignore[attr-defined]
        return context.on_save_for_backward(tensor)

    return saved_tensors_hooks(pack, context.on_get_saved_tensor)


def link(attention: Any) -> None:
    """Lets the output projection of an attention layer share the copies of its core attention, from
    the first call on.

    `linear_proj` and the core attention that stays are made by constructors of subclasses.
    """
    if current().offload:
        before_first_call(attention, "_cp_ring_shares", lambda layer: _share(layer.linear_proj))


def _share(projection: torch.nn.Module) -> None:
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            entered.append(offload().sharing())
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    projection.register_forward_pre_hook(enter)
    projection.register_forward_hook(leave, always_call=True)


def in_backward() -> bool:
    """Whether activations are recomputed."""
    return torch._C._current_graph_task_id() != -1
