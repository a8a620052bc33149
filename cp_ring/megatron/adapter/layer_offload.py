"""Moves the tensors that attention layers save for backward to host memory, if Megatron offloads.

Megatron has two ways: fine-grained offloading, and the offloading of TransformerEngine
(--cpu-offloading-num-layers). Both are hooks for saved tensors around a layer or a part of it, and
both skip tensors that are marked as not to be moved. TransformerEngine before 2.10, or with
NVTE_CPU_OFFLOAD_V1=1, moves only tensors that are marked, as its own attention marks them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saving(keep: Iterable[Tensor | None], config: Any = None) -> AbstractContextManager[Any]:
    """Return the context of one attention call. If Megatron moves saved tensors to host memory, the
    context moves all of them except `keep`.

    config: the layer's configuration, which holds the context of TransformerEngine's offloading.
    The context does nothing during recomputation, because the backward of such a call follows at
    once.
    """
    kept = [x for x in keep if x is not None]
    for x in kept:
        x._TE_do_not_offload = True  # type: ignore[attr-defined]
    recomputes = torch._C._current_graph_task_id() != -1  # in backward
    if not torch.is_grad_enabled() or recomputes:
        return nullcontext()
    context = getattr(config, "_cpu_offloading_context", None)
    if hasattr(context, "on_save_for_backward"):
        return _marked(kept, context)
    return nullcontext()


def _marked(keep: Iterable[Tensor], context: Any) -> saved_tensors_hooks:
    """Return the hooks of TransformerEngine's `context`; they receive tensors marked as to be
    moved, except `keep`.
    """
    stay = {x.data_ptr() for x in keep}

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() not in stay:
            tensor.activation_offloading = True  # type: ignore[attr-defined]
        return context.on_save_for_backward(tensor)

    return saved_tensors_hooks(pack, context.on_get_saved_tensor)
