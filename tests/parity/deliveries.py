"""Microbatches as training scripts may deliver them: batch rows of short documents, packed
sequences (thd), uneven loss masks.
"""

import contextlib
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from cp_ring import Mask

# every padded sequence is a multiple of this, so that it splits at any context-parallel size up to
# 8
PADDED = 16
JOINED = "joined "
"""Before a kind of microbatches: the batch rows of each are one row."""


@contextlib.contextmanager
def delivered(how):
    """Within the context Megatron's mock data consist of short documents ("documents"), which "thd"
    packs.

    With "sections" their tokens have other positions in each section of mrope, as images have;
    "sections_documents" and "sections_thd" are both.

    With "uneven" the loss counts only some tokens of the middle; with "uneven_mean" it is also a
    mean of microbatches (without --calculate-per-token-loss). The names of `MASKS` give each batch
    row a mask of its own. "" changes nothing.
    """
    if not how:
        yield
        return
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from cp_ring import pretrain_gpt
    from cp_ring.megatron import gpt

    if how.startswith(JOINED):
        config, read = gpt.dataset_config, gpt._read_and_broadcast
        with (
            delivered(how.removeprefix(JOINED)),
            patch.object(gpt, "dataset_config", partial(_of_short_rows, config)),
            patch.object(gpt, "_read_and_broadcast", partial(_joined, read)),
        ):
            yield
        return

    if how.startswith("sections"):
        with (
            delivered(how.partition("_")[2]),
            patch.object(
                gpt, "_read_and_broadcast", partial(_in_sections, gpt._read_and_broadcast)
            ),
        ):
            yield
        return

    if how in ("uneven", "uneven_mean"):
        flags = pretrain_gpt._FLAGS[1:] if how == "uneven_mean" else pretrain_gpt._FLAGS
        with (
            patch.object(gpt, "_next_batch", partial(_uneven, gpt._next_batch)),
            patch.object(pretrain_gpt, "_FLAGS", flags),
        ):
            yield
        return

    if how in MASKS:
        with patch.object(
            gpt,
            "_read_and_broadcast",
            partial(_with_masks, gpt._read_and_broadcast, MASKS[how]),
        ):
            yield
        return

    with (
        patch.object(MockGPTLowLevelDataset, "max_sequence_length", 24),
        patch.object(gpt, "get_batch", _packed_batch if how == "thd" else gpt.get_batch),
    ):
        yield


def _shared_prefix(n, random):
    lengths = random.integers(3, 9, 6).tolist()
    return Mask.shared_prefix([(lengths[0] + 6, lengths[1:4]), (lengths[4], lengths[5:])], n)


def _images(n, random):
    edges = np.sort(random.choice(np.arange(1, n), 4, replace=False))
    return Mask.images(n, edges.reshape(2, 2))


def _global(n, random):
    start = int(random.integers(5, n - 5))
    return Mask.with_global(n, [(0, 2), (start, start + 3)], (7, 0))


MASKS = {"shared_prefix": _shared_prefix, "images": _images, "global": _global}
"""Masks that batches carry; those of shared prefixes come as plain numbers."""


def _with_masks(read, make, data_iterator, *names):
    """Reads a batch to which the data loader has added a mask for each batch row, which depends on
    its tokens only. Probes bring their own.
    """
    if data_iterator is None:
        return read(data_iterator, *names)
    batch = dict(next(data_iterator))
    seeds = batch["tokens"].sum(1).tolist()
    batch.setdefault(
        "cp_ring_mask",
        [make(batch["tokens"].shape[1], np.random.default_rng(seed)) for seed in seeds],
    )
    return read(iter([batch]), *names)


def _in_sections(read, data_iterator, *names):
    """Reads a batch whose data set has given each token positions in time, height and width: of an
    image of 3 x 4 patches behind the fifth token of each document, which takes 4 steps in time.
    """
    if data_iterator is None:
        return read(data_iterator, *names)
    batch = dict(next(data_iterator))
    ids = batch["position_ids"]
    patch_of = (ids - 5).clamp(0, 12)  # the first one behind an image is 12
    text = torch.where(ids < 5, ids, ids - 12 + 4).clamp(min=0)
    inside = (ids >= 5) & (ids < 17)
    height, width = 5 + patch_of // 4, 5 + patch_of % 4
    sections = [5, height, width]
    batch["position_ids"] = torch.stack(
        [torch.where(inside, torch.as_tensor(each), text) for each in sections], 1
    )
    return read(iter([batch]), *names)


def _of_short_rows(config, args):
    made = config(args)
    made.sequence_length //= args.micro_batch_size
    return made


def _joined(read, data_iterator, *names):
    """All documents of a microbatch in one row, where they were in several shorter ones."""
    batch = read(data_iterator, *names)
    return {name: x if name == "cu_seqlens" else x.reshape(1, -1) for name, x in batch.items()}


def _uneven(next_batch, data_iterator):
    """Counts no token of the first and last eighth, which the first of 4 ranks holds, and two
    thirds of the others.
    """
    batch = next_batch(data_iterator)
    n = batch["loss_mask"].shape[1]
    place = torch.arange(n)
    batch["loss_mask"][:, (place < n // 8) | (place >= n - n // 8) | (place % 3 == 1)] = 0
    return batch


def _packed_batch(data_iterator, vp_stage):
    """A batch row of the data set, cut into padded sequences of odd lengths, and this rank's part
    in Megatron's thd split.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_ring import Layout
    from cp_ring.megatron import gpt

    # with --cp-ring-document-mask every pipeline stage reads its microbatch
    batch = gpt._next_batch(data_iterator)
    batch.pop("cu_seqlens", None)
    real, padded = cut(batch["tokens"].shape[1], int(batch["tokens"].sum()))
    is_padding = np.ones(padded[-1], bool)
    for start, length in zip(padded[:-1], np.diff(real), strict=True):
        is_padding[start : start + length] = False
        batch["loss_mask"][:, start + length - 1] = 0
    whole = gpt._mrope_positions(batch)
    for tensor in batch.values():
        tensor[:, torch.from_numpy(is_padding)] = 0
    cp = parallel_state.get_context_parallel_world_size()
    layout = (
        Layout.per_document_zigzag(padded, cp) if cp > 1 else Layout.contiguous(int(padded[-1]), 1)
    )
    mine = torch.from_numpy(layout.positions(parallel_state.get_context_parallel_rank()))
    offsets, offsets_padded = torch.from_numpy(real).int(), torch.from_numpy(padded).int()
    longest = int(np.diff(padded).max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, cu_seqlens_q_padded=offsets_padded,
        cu_seqlens_kv_padded=offsets_padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
    mine = {name: tensor[:, mine] for name, tensor in batch.items()}
    return mine | whole | {"packed_seq_params": packed}


def cut(n, seed):
    """Offsets of sequences of odd lengths, and of the padded ones that they lie in, which fill `n`
    tokens.
    """
    random = np.random.default_rng(seed)
    inner = np.flatnonzero(random.integers(0, 2, n // PADDED - 1)) + 1
    padded = np.array([0, *(inner * PADDED), n])
    length = np.diff(padded) - 1 - 2 * random.integers(0, 4, len(padded) - 1)
    return np.append(0, np.cumsum(length)), padded
