"""Megatron's own scheduler of hybrid context parallelism, asked for a schedule; nothing is run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cp_ring.errors import ConfigError
from cp_ring.megatron.rejection import first_line


def hybrid_groups(lengths: np.ndarray, ranks: int, tokens_per_rank: int) -> list[list[list[int]]]:
    """For each group of microbatches and each of `ranks`, the documents that it works on, by
    `BalancedCPScheduler`.

    lengths: tokens of the documents, padding included, int64 [documents]. tokens_per_rank:
    `--max-seqlen-per-dp-cp-rank`.
    Raises `ConfigError` where Megatron is not installed, or its scheduler fails for these lengths.
    """
    try:
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise ConfigError(
            f"the scheduler of hybrid context parallelism is not there: {error}"
        ) from None
    scheduler = BalancedCPScheduler(tokens_per_rank, SimpleNamespace(size=lambda: ranks))
    samples = [(index, int(length)) for index, length in enumerate(lengths)]
    try:
        _, ids = scheduler.get_groups_and_subsamples(samples, None)
    except (AssertionError, IndexError, ValueError, ZeroDivisionError, RecursionError) as error:
        reason = first_line(error) or type(error).__name__
        raise ConfigError(
            f"Megatron's hybrid scheduler fails for these lengths: {reason}"
        ) from None
    return [[list(mine) for mine in group] for group in ids]
