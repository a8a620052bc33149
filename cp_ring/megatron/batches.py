"""Splits microbatches and their masks over the context-parallel ranks, for programs that build
their own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.ahead import LAYERS, LayerPlan, PlannedBatch
from cp_ring.megatron.adapter.config import RingConfig, in_force, use
from cp_ring.megatron.adapter.documents import (
    ALONE,
    Documents,
    boundaries,
    thd_params,
)
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask
from cp_ring.megatron.data.rows import (
    check_length,
    check_rows,
    declare,
    on_this_cp_rank,
)
from cp_ring.megatron.options import Options
from cp_ring.megatron.settings import configure, current
from cp_ring.plan.ranges import offsets

OFFSETS = "cu_seqlens"
PADDED = "cu_seqlens_padded"
SIZE = "local_cp_size"
_OF_TOKENS = ("tokens", "input_ids", "labels", "loss_mask", "position_ids")
_OF_PACKED = (OFFSETS, PADDED, SIZE, "max_seqlen")


def split_batch(batch: Mapping[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Return this rank's part of a microbatch, with the microbatch's mask as `packed_seq_params`.

        mine = cp_ring.megatron.split_batch(batch)
        loss = model(mine["tokens"], mine["position_ids"], None, labels=mine["labels"],
                     packed_seq_params=mine["packed_seq_params"])

    Args:
        batch: tensors [b, n] of whole batch rows by name. Other entries are left as they are,
            such as position ids [3, b, n] of images, which the model splits itself (mrope).
            `cp_ring_mask` may hold a `Mask` of n tokens, or a list of b of them. Without it the
            mask is causal; with --cp-ring-document-mask it is that of the documents, which begin
            where `position_ids` are 0. With `cu_seqlens`, the only batch row holds packed
            documents: offsets int32 [1, documents + 1] or [documents + 1], padded with -1 if
            needed, and `cu_seqlens_padded` if documents have padding. With `local_cp_size`, so many
            ranks share the packed documents; see `group_of_size`.
        cp_group: the context-parallel process group; the default is Megatron's.

    Returns:
        The tensors [b, n / cp], and `packed_seq_params`: pass it to the model, which passes it to
        every layer. It is None for causal batch rows without documents. For packed documents it
        has the format thd, and each document is split by zigzag, as in TransformerEngine. With
        `document_mask` and without `local_cp_size`, the layout in force splits all documents
        together, and they may have any length. If the mask has its own positions, `position_ids`
        are those, so that a response continues from its prompt.

    Raises:
        ConfigError: for a mask of another length, or of a kind that --cp-ring-mask-kinds does not
            name; for packed documents that cannot be split; for a tensor of another shape that
            holds a value for each token.
        PlanError: on all ranks, if their integer tensors differ. The ranks compare the first
            microbatches, then one in --cp-ring-compare-every.
    """
    group = cp_group or compat.group_of(None, "cp")
    if batch.get(SIZE) is not None:
        group = group_of_size(int(batch[SIZE]), group)
    check_rows(batch, group)
    if batch.get(OFFSETS) is not None:
        return _split_packed(batch, group)
    if batch.get(SIZE) is not None:
        raise ConfigError(f"{SIZE} needs packed documents: give their offsets as {OFFSETS}")
    whole = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2
    }
    sizes = {tuple(value.shape) for value in whole.values()}
    if len(sizes) != 1:
        raise ConfigError(
            "the tensors of a batch must be [b, n] of one size, not "
            f"{', '.join(map(str, sorted(sizes))) or 'none'}"
        )
    ((count, n),) = sizes
    rest = {name: value for name, value in batch.items() if name not in whole and name != KEY}
    _check_rest(rest, count, n)
    carried: MicrobatchMask | None = None
    if current().document_mask:
        carried = _documents(batch, n, group.size())
    elif KEY in batch or current().kinds:
        carried = declared = declare(batch.get(KEY), count, n, group.size())
        whole = declared.with_positions(whole)
    else:
        check_length(n, group.size())
    return rest | on_this_cp_rank(whole, group.rank(), group.size(), carried)


def plan_ahead(
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Callable[[list[Any]], Any]:
    """Return a `collate_fn` for a torch `DataLoader` whose workers make the plans of packed
    microbatches, so that training does not wait for them.

        loader = DataLoader(dataset, num_workers=2, collate_fn=cp_ring.megatron.plan_ahead())

    Build the model before the workers start: they read from its layers what plans these need. Where
    workers make none, because there are none or because documents contradict each other, the first
    layer makes them, or raises the error.

    Args:
        collate: makes a batch of samples, a dict as for `split_batch`; the default is torch's.
    """
    return _Planning(collate)


class _Planning:
    """The function that `plan_ahead` returns. What it reads of layers and settings goes with it to
    workers that are not forked.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __reduce__(self) -> Any:
        return _in_worker, (self.collate, set(LAYERS), current(), in_force())

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if get_worker_info() is None or not isinstance(batch, dict):
            return batch
        planned = PlannedBatch(batch)
        planned.made = {}
        with suppress(ConfigError, PlanError):
            for layer in LAYERS:
                if (documents := _documents_in(batch, layer.cp)) is not None:
                    planned.made[documents.key] = documents
                    documents.rank_plan(layer.rank, layer.window, layer.causal, layer.spec)
        return planned


def _in_worker(collate: Any, layers: set[LayerPlan], options: Options, ring: RingConfig) -> Any:
    LAYERS.update(layers)
    configure(options)
    use(ring)
    return plan_ahead(collate)


def _documents_in(batch: Mapping[str, Any], cp: int) -> Documents | None:
    """Return the documents of a collated batch, or None if it has none, or not for all `cp`
    ranks.
    """
    if batch.get(OFFSETS) is None:
        own = current().document_mask and "position_ids" in batch
        return _documents(batch, batch["position_ids"].shape[-1], cp) if own else None
    if batch.get(SIZE) is not None:
        return None
    real = _in_one_stream(batch[OFFSETS])
    padded = real if batch.get(PADDED) is None else _in_one_stream(batch[PADDED])
    return _in_thd(thd_params(real, padded), cp, current().document_mask)


def _in_one_stream(rows: torch.Tensor) -> torch.Tensor:
    """Return the offsets of documents, int32 [documents + 1], of batch rows [b, m] one after
    another, as Megatron joins them: without what fills a row up, -1 or its length again.
    """
    rows = rows.reshape(-1, rows.shape[-1])
    starts = rows.max() * torch.arange(len(rows), dtype=rows.dtype)
    return (rows + starts[:, None])[rows >= 0].unique()


def group_of_size(size: int, cp_group: Any) -> Any:
    """Return the group of `size` neighboring ranks, including this one, that share a microbatch
    (dynamic context parallelism): `cp_group`, this rank alone, or a group of Megatron's.

    Megatron makes groups of 2, 4, 8, ... of the data- and context-parallel ranks, once, for
    `initialize_model_parallel(hybrid_context_parallel=True)`, which its branch dev calls
    `dynamic_context_parallel`. Raises `ConfigError` for others.
    """
    from megatron.core import parallel_state

    if size == cp_group.size():
        return cp_group
    if size == 1:
        return ALONE
    find = getattr(parallel_state, "get_hybrid_data_context_parallel_groups", None)
    try:
        return (find or parallel_state.get_dynamic_data_context_parallel_groups)(group_size=size)
    except (AssertionError, KeyError):
        raise ConfigError(
            f"{SIZE} {size}: there is no such group: give a power of two, and "
            "initialize_model_parallel(hybrid_context_parallel=True)"
        ) from None


def _split_packed(batch: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Split packed documents: return the parts [1, n / cp] and their `PackedSeqParams`."""
    cp = group.size()
    real = _offsets(batch[OFFSETS], OFFSETS)
    padded = real if batch.get(PADDED) is None else _offsets(batch[PADDED], PADDED)
    packed = thd_params(real, padded, None if batch.get(SIZE) is None else group)
    n = int(padded[-1])
    tensors = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and name not in _OF_PACKED
    }
    whole = {name: value for name, value in tensors.items() if value.shape == (1, n)}
    if not whole:
        sizes = ", ".join(sorted({str(tuple(value.shape)) for value in tensors.values()}))
        raise ConfigError(
            f"{OFFSETS} ends at {n} tokens, so tensors of a batch must be {(1, n)}, not "
            f"{sizes or 'none'}"
        )
    rest = {
        name: value for name, value in batch.items() if name not in whole and name not in _OF_PACKED
    }
    _check_rest(rest, 1, n)
    together = batch.get(SIZE) is None and current().document_mask
    if together:
        check_length(n, cp)
    elif batch.get(SIZE) is None and not current().named_layout.stock and cp > 1:
        raise ConfigError(
            f"{OFFSETS}: documents that are split one by one are split by zigzag, not "
            f"{current().layout}: give document_mask=True (--cp-ring-document-mask)"
        )
    if n % cp:
        raise ConfigError(
            f"{OFFSETS}: {n} packed tokens cannot be split over {cp} context-parallel ranks: pad "
            f"them to a multiple of {2 * cp}"
        )
    parts = on_this_cp_rank(whole, group.rank(), cp, _in_thd(packed, cp, together))
    return rest | parts | ({} if together else {"packed_seq_params": packed})


def _in_thd(packed: Any, cp: int, together: bool) -> Documents:
    """Return the documents of `thd_params`, which are split together or as the job says."""
    ring = in_force()
    split = ring.split if together else ring.split_of_packed
    return Documents.in_thd(packed, int(packed.cu_seqlens_q_padded[-1]) // cp, cp, split)


def _check_rest(rest: Mapping[str, Any], batch: int, n: int) -> None:
    """Raise `ConfigError` for a tensor that would stay whole although it holds a value for each
    token of `batch` rows of `n` tokens. The model itself splits position ids with sections, [3, b,
    n].
    """
    for name, x in rest.items():
        if not isinstance(x, torch.Tensor):
            continue
        by_row = x.dim() <= 2 and (name in _OF_TOKENS or (x.numel() >= n and x.numel() % n == 0))
        if by_row or (x.dim() > 2 and x.shape[:2] == (batch, n)):
            raise ConfigError(
                f"{name} is {tuple(x.shape)}: only tensors {(batch, n)} are split, and this one "
                "has values of each token; give it as tensors of that size, or leave it out"
            )


def _offsets(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return checked document offsets, int32 [documents + 1], on their device. Drops the entries of
    -1 that fill up a tensor of fixed size.
    """
    flat = tensor.detach().reshape(-1)
    used = (flat >= 0).nonzero()
    if len(used):
        flat = flat[: int(used[-1]) + 1]
    checked = offsets(flat, name)
    if len(checked) < 2:
        raise ConfigError(
            f"{name} is {checked.tolist()}: give the offsets of at least one document"
        )
    return torch.from_numpy(checked).to(tensor.device, torch.int32)


def _documents(batch: Mapping[str, Any], n: int, cp: int) -> Documents:
    """Return the documents of batch rows of `n` tokens; a document begins where position
    ids are 0.
    """
    if "position_ids" not in batch:
        raise ConfigError(
            "--cp-ring-document-mask: the batch has no position_ids: give position_ids that begin "
            "at 0 in each document"
        )
    check_length(n, cp)
    ids = batch["position_ids"]
    return Documents.in_rows(boundaries(ids.cpu()), ids.shape[-2], cp, in_force().split)
