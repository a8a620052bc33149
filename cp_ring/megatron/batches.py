"""Splits a microbatch that carries a mask over the context-parallel ranks: for scripts that build their own batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from cp_ring.megatron.documents import DocumentParams
from cp_ring.megatron.masks import KEY, DeclaredMask, read
from cp_ring.megatron.settings import current


def split_batch(batch: Mapping[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """This rank's part of a microbatch, and the mask of the microbatch as `packed_seq_params`.

    Args:
        batch: tensors [b, n] of whole batch rows by name, and under `cp_ring_mask` a `Mask` of n tokens, what `Mask.to_dict`
            returns, or a list of b of these; without it the mask is causal. What is not a tensor [b, n] is left as it is.
        cp_group: the context-parallel process group, by default Megatron's.

    Returns:
        The tensors [b, n / cp], and `packed_seq_params`: hand it to the model, which gives it to every layer. `position_ids` are
        those of the mask where it has positions of its own, so that a response continues from its prompt.

    Raises:
        ConfigError: for a mask of another length, or of a kind that --cp-ring-mask-kinds does not name.
    """
    group = compat.group_of(None, "cp") if cp_group is None else cp_group
    whole = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() == 2}
    sizes = {tuple(value.shape) for value in whole.values()}
    if len(sizes) != 1:
        raise ConfigError(
            f"the tensors of a batch must be [b, n] of one size, not {', '.join(map(str, sorted(sizes))) or 'none'}"
        )
    ((count, n),) = sizes
    declared = declare(batch.get(KEY), count, n, group.size())
    rest = {name: value for name, value in batch.items() if name not in whole and name != KEY}
    whole = with_positions(whole, declared)
    parts = {name: declared.shard(value, group.rank()) for name, value in whole.items()}
    return rest | parts | {"packed_seq_params": DocumentParams.carry(declared)}


def declare(given: Any, batch: int, n: int, cp: int) -> DeclaredMask:
    """The mask of a microbatch from its entry `cp_ring_mask`, split by the layout in force."""
    if n % (2 * cp if current().layout == "zigzag" else cp) and cp > 1:
        raise ConfigError(
            f"batch rows of {n} tokens cannot be split over {cp} context-parallel ranks, {current().layout}: pad them, and give "
            "the constructor of the mask n="
        )
    if given is not None and not current().kinds:
        raise ConfigError(f"the batch carries {KEY}, of which the job knows nothing: give --cp-ring-mask-kinds")
    return DeclaredMask.of_rows(read(given, batch, n, current().kinds), current().layout, cp)


def with_positions(whole: dict[str, torch.Tensor], declared: DeclaredMask) -> dict[str, torch.Tensor]:
    """The tensors [b, n], with the position ids of the mask where it has positions of its own."""
    if "position_ids" not in whole or not declared.own_positions:
        return whole
    ids = whole["position_ids"]
    return whole | {"position_ids": torch.from_numpy(declared.whole.positions).view(ids.shape).to(ids)}
