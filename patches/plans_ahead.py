"""Makes the plans of packed microbatches in the workers of Megatron's data loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cp_ring.megatron.adapter.ahead import share
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.wrapping import Function, around, loaded_modules
from cp_ring.patches.patch import Patch, Replacement


def _planning(build: Function, *args: Any, **named: Any) -> Any:
    from torch.utils.data import DataLoader

    from cp_ring.megatron.batches import plan_ahead

    loader = build(*args, **named)
    if isinstance(loader, DataLoader):
        loader.collate_fn = plan_ahead(loader.collate_fn)
        if loader.num_workers == 0:
            note(
                "--num-workers 0: training waits while the plan of each packed microbatch is made; "
                "with workers they make it"
            )
    return loader


@around
def _sharing(get_batch: Function, *args: Any, **named: Any) -> Any:
    from megatron.core import parallel_state

    batch = get_batch(*args, **named)
    share(parallel_state.get_tensor_model_parallel_group())
    return batch


def _replacements() -> Iterator[Replacement]:
    import megatron.training.training  # noqa: F401

    name = "get_batch_on_this_tp_rank"  # the branch dev has two
    for module in loaded_modules("megatron."):
        if hasattr(module, name):
            yield module, name, _sharing(getattr(module, name))


PATCH = Patch(
    what="makes the plans of packed microbatches in the workers of the data loader, and sends them "
    "to tensor-parallel ranks that load no data",
    why="Megatron's loaders take no function that collates samples, and its batches carry tensors "
    "alone",
    needed=lambda args, options: (
        options.enabled
        and args.cp > 1
        and (options.document_mask or args.sft or args.dataloader_inter_document_masking)
    ),
    wraps={"megatron.training.datasets.data_samplers.build_pretraining_data_loader": _planning},
    replacements=_replacements,
    order=2,
)
