"""The keys of attention dropout in training: one for each layer and microbatch, the same at any
split of ranks and of layers.

A microbatch has a number: how many microbatches of the whole job came before it. Each layer counts
its own, and keeps the count in Megatron's tracker of random states. So the number of a microbatch
is the same when its layer is recomputed, because Megatron restores these states before; and a job
that resumes from a checkpoint, which has these states, continues the count.

Layers that predict further tokens (MTP) have numbers of their own. Megatron counts them from 1
again, or from where the pipeline stage that holds them ends.

Hidden dropout does not go through here: see `docs/megatron.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from cp_ring.megatron.compat import arguments

if TYPE_CHECKING:
    from cp_ring.kernels.dropout import Dropout

_NAME = "cp_ring attention dropout of layer "
_PREDICTING = 1 << 20  # more than the layers of any model


def number_of_prediction(depth: int, index: int) -> int:
    """The layer number, for `next_key`, of the attention layer `index` (from 0) of the MTP layer
    `depth` (from 1).
    """
    return _PREDICTING * depth + index


def next_key(layer_number: int, calls: int = 1) -> int:
    """The key of the next call of a layer, which a microbatch passes `calls` times: one MTP layer
    may be that of all depths.
    """
    from megatron.core import tensor_parallel  # heavy, and installed with Megatron only

    from cp_ring.kernels.dropout import mixed

    tracker = tensor_parallel.get_cuda_rng_tracker()
    states, name = tracker.get_states(), f"{_NAME}{layer_number}"
    before = states.get(name)
    if before is None:
        before = torch.tensor([_seed(), _microbatches_before() * calls])
    seed, count = (int(x) for x in before)
    microbatch, call = divmod(count, calls)
    rank, ranks = _data_parallel()
    after = count + 1 if call + 1 < calls else (microbatch + ranks) * calls
    tracker.set_states(states | {name: torch.tensor([seed, after])})
    return mixed(seed, layer_number + call * _PREDICTING, microbatch + rank)


@contextmanager
def same_key(layer_number: int) -> Iterator[int]:
    """The key of the next microbatch of a layer, which within the block is the key of its next call
    too.
    """
    from megatron.core import tensor_parallel  # heavy, and installed with Megatron only

    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    key = next_key(layer_number)
    tracker.set_states(states)
    try:
        yield key
    finally:
        tracker.set_states(states)


def dropout_of(
    p: float, layer_number: int, positions: torch.Tensor, first_head: int, calls: int = 1
) -> Dropout:
    """The dropout of the next call of a layer; `positions` as in `Dropout`, `calls` as in
    `next_key`.
    """
    from cp_ring.kernels.dropout import Dropout

    return Dropout(p, next_key(layer_number, calls), positions, first_head)


def _seed() -> int:
    """Megatron's --seed, or what torch was seeded with: the same on all pipeline stages, or on all
    ranks of one.
    """
    seed = getattr(arguments(), "seed", None)
    return int(seed if seed is not None else torch.initial_seed()) % 2**63


def _microbatches_before() -> int:
    """Microbatches of the job before this process: where a layer's count starts that no checkpoint
    has.
    """
    args = arguments()
    consumed, size = (
        getattr(args, name, None) or 0 for name in ("consumed_train_samples", "micro_batch_size")
    )
    return int(consumed // size) if size else 0


def _data_parallel() -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and theirs: microbatch i of rank r is
    number i * ranks + r.
    """
    from megatron.core import parallel_state  # heavy, and installed with Megatron only

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
