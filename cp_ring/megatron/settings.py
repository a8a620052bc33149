"""The cp_ring settings in force in this process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cp_ring.config import ContextParallelConfig

INTER_DOCUMENT = "--dataloader-inter-document-masking"
PER_TOKEN_LOSS = "--calculate-per-token-loss"

_current = ContextParallelConfig.make(enabled=True)
_whole_rows = False


def current() -> ContextParallelConfig:
    """The settings in force; the defaults unless `install`, or the parsed flags, changed them."""
    return _current


def packed_in_whole_rows() -> bool:
    """Whether this job's packed documents (thd) are split all together, as one row, instead of one by one.

    Megatron's data loader splits them so under --dataloader-inter-document-masking, and nothing in its batches tells.
    """
    return _whole_rows


def configure(config: ContextParallelConfig, whole_rows: bool | None = None) -> None:
    """Puts `config` in force for layers and batches made from now on, and what `packed_in_whole_rows` says unless it is None."""
    global _current, _whole_rows
    _current = config
    _whole_rows = _whole_rows if whole_rows is None else whole_rows


def flags(argv: Sequence[str]) -> ContextParallelConfig:
    """The cp_ring settings among the flags of a command line; all others are passed over."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ContextParallelConfig.add_arguments(parser)
    return ContextParallelConfig.from_args(parser.parse_known_args(list(argv))[0])
