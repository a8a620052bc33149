"""Holds the cp_ring settings in force in this process. They are read from the flags once, and put
in force for the layers as a `RingConfig`.

Nothing heavy is imported here: entry modules read the flags before they load torch and Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import config as adapter
from cp_ring.megatron.options import Options
from cp_ring.runtime import RUNTIME

_in_force = RUNTIME.cell(Options.make(enabled=True))
_SHARED = {each.name for each in fields(Options)} & {
    each.name for each in fields(adapter.RingConfig)
}


def current() -> Options:
    """Return the settings in force: the defaults unless `install` or the parsed flags
    changed them.
    """
    return _in_force.value


def ring() -> adapter.RingConfig:
    """Return the configuration of layers in force."""
    return adapter.in_force()


def configure(config: Options, **more: Any) -> None:
    """Put `config` in force for layers and batches made from now on. `more` are fields of
    `RingConfig` that `config` does not have; the others and those that are None do not change.
    """
    _in_force.value = config
    values = {name: getattr(config, name) for name in _SHARED}
    values |= {name: value for name, value in more.items() if value is not None}
    adapter.use(replace(ring(), declared_masks=bool(config.kinds), **values))


@contextmanager
def in_force(config: Options) -> Iterator[None]:
    """Put `config` in force within the context."""
    before = current()
    layers = ring()
    configure(config)
    try:
        yield
    finally:
        _in_force.value = before
        adapter.use(layers)


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
