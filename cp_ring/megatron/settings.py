"""Holds the cp_ring settings in force in this process. They are read from the flags once, then by
every layer and batch.

Nothing heavy is imported here: entry modules read the flags before they load torch and Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from cp_ring.errors import ConfigError
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import replaced
from cp_ring.runtime import RUNTIME

LayerWindows = tuple[tuple[tuple[int, int], int], ...]
"""The windows (left, right) of a model's attention layers (-1 for any number of keys), each with
the number of layers that have it.
"""


@dataclass
class _InForce:
    config: Options = field(default_factory=lambda: Options.make(enabled=True))
    whole_rows: bool = False
    row: int = 0
    layers: LayerWindows = (((-1, -1), 1),)


_in_force = RUNTIME.keep(_InForce())


def current() -> Options:
    """Return the settings in force: the defaults unless `install` or the parsed flags
    changed them.
    """
    return _in_force.config


def packed_in_whole_rows() -> bool:
    """Return True if this job splits packed documents (thd) together as one sequence, not one by
    one.

    Megatron's data loader does so with --dataloader-inter-document-masking. Its batches do not say
    which of the two ways they were split.
    """
    return _in_force.whole_rows


def tokens_of_a_row() -> int:
    """Return the tokens of a whole batch row that a program told `enable`; 0 if unknown."""
    return _in_force.row


def layer_windows() -> LayerWindows:
    """Return the windows of the model's layers; a balanced layout balances them together."""
    return _in_force.layers


def split_by_microbatch() -> bool:
    """Return True if a rank's tokens or their positions may differ between microbatches."""
    config = _in_force.config
    return bool(config.mask_kinds) or (config.document_mask and config.named_layout.weighs)


def configure(
    config: Options,
    whole_rows: bool | None = None,
    layers: LayerWindows | None = None,
    row: int | None = None,
) -> None:
    """Put `config` in force for layers and batches made from now on. `whole_rows`, `layers` and
    `row` (tokens of a whole batch row) change unless they are None.
    """
    _in_force.config = config
    if row is not None:
        _in_force.row = row
    if whole_rows is not None:
        _in_force.whole_rows = whole_rows
    if layers is not None:
        _in_force.layers = layers


def in_force(config: Options) -> AbstractContextManager[None]:
    """Put `config` in force within the context."""
    return replaced((_in_force, "config", config))


def flags(argv: Sequence[str]) -> Options:
    """Return the cp_ring settings among the flags of a command line; ignore all other flags. Raises
    `ConfigError` for a bad value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    Options.add_arguments(parser)
    try:
        return Options.from_args(parser.parse_known_args(list(argv))[0])
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
