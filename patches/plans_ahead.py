"""Makes the plans of packed microbatches in the workers of Megatron's data loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.wrapping import around
from cp_ring.patches.patch import Patch, Replacement


@around
def _planning(build: Callable[..., Any], *args: Any, **named: Any) -> Any:
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


def _replacements() -> Iterator[Replacement]:
    from megatron.training import training

    name = "build_pretraining_data_loader"
    yield training, name, _planning(getattr(training, name))


PATCH = Patch(
    what="makes the plans of packed microbatches in the workers of the data loader",
    why="Megatron's loaders take no function that collates samples",
    needed=lambda args, options: (
        options.enabled
        and args.cp > 1
        and (options.document_mask or args.sft or args.dataloader_inter_document_masking)
    ),
    replacements=_replacements,
    order=2,
)
