"""The microbatch that a job trains on first, as its data set, sampler and collate function make it:
taken from the data iterators, and handed back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.certificate.batch import PREFIX

Item = dict[str, Any]


def take(iterators: Any) -> list[Item | None]:
    """Take one item of each of Megatron's data iterators (one, or one for each virtual stage), as
    training does later; None where a rank has no data.
    """
    several = iterators if isinstance(iterators, list) else [iterators]
    return [_take(iterator) for iterator in several]


def _take(iterator: Any) -> Any:
    # beneath Megatron's record of microbatches
    item = next(iterator.iterable, None) if hasattr(iterator, "iterable") else None
    if item is not None:
        iterator.iterable = _handed_back(iterator, iterator.iterable, item)
    return item


def _handed_back(iterator: Any, rest: Any, item: Item) -> Iterator[Item]:
    """Yield `item` when training asks for it, and put the iterator back as it was."""
    iterator.iterable = rest
    yield item


def shared_items(items: list[Item | None]) -> list[Any]:
    """Return the item of the first of the ranks that share a microbatch, what a whole model on this
    rank reads, and `items`; [] if there is no data. All ranks call it together if one has `items`.
    """
    own = next((each for each in items if each is not None), None)
    held = [own]
    for name in ("pp", "tp", "cp") if items else ():
        dist.broadcast_object_list(held, group=compat.group_of(None, name), group_src=0)
    (whole,) = held
    if own is None and compat.group_of(None, "tp").rank() == 0:  # which loads for the others
        own = whole
    return [whole, own, *items] if whole else []


def mask_of(item: Item) -> str:
    """Return the kind of mask that an item declares."""
    used = settings.current()
    if used.kinds:
        return PREFIX + used.kinds[0]
    if item.get("cu_seqlens") is not None:
        return "packed"
    return "documents" if used.document_mask else "causal"
