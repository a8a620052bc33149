"""The cp_ring settings in force in this process, and the plans made from them."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from cp_ring.config import ContextParallelConfig
from cp_ring.megatron.compat import check_version
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RingPlan

_LAYOUTS = {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}
_MASKS = {"causal": Mask.causal, "no_mask": Mask.full}

_current = ContextParallelConfig.make(enabled=True)


def current() -> ContextParallelConfig:
    """The settings in force; the defaults unless `install`, or the parsed flags, changed them."""
    return _current


def configure(config: ContextParallelConfig) -> None:
    """Puts `config` in force for layers and batches made from now on."""
    global _current
    _current = config


def flags(argv: Sequence[str]) -> ContextParallelConfig:
    """The cp_ring settings among the flags of a command line; all others are passed over."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ContextParallelConfig.add_arguments(parser)
    return ContextParallelConfig.from_args(parser.parse_known_args(list(argv))[0])


def install(argv: Sequence[str]) -> ContextParallelConfig:
    """Applies the patches that the flags in `argv` ask for, and returns the settings; none without --cp-ring or --cp-ring-cpu.

    Raises `ConfigError` for a bad value, or where the installed Megatron is outside the supported versions.
    """
    config = flags(argv)
    if not (config.enabled or config.cpu):
        return config
    check_version()
    names = ["dataset_helpers", "arguments", "optimizer_step"]
    if config.cpu:
        names.insert(0, "cpu_runtime")
    if config.enabled:
        names.append("core_attention")
    if config.enabled and config.layout != "zigzag":
        names.append("rotary_layout")
    patches = importlib.import_module("cp_ring.patches")
    for name in names:
        patches.get(name).apply()
    configure(config)
    return config


def make_layout(name: str, n: int, cp: int) -> Layout:
    """The layout called `name` of `n` tokens over `cp` ranks."""
    return _LAYOUTS[name](n, cp)


@functools.lru_cache(maxsize=64)
def make_plan(mask: str, n: int, cp: int, layout: str, route: str) -> RingPlan:
    """The verified plan for mask kind `causal` or `no_mask` over `n` tokens; made once per process and shared by all layers."""
    plan = RingPlan.build(_MASKS[mask](n), make_layout(layout, n, cp), route=route)
    plan.verify()
    return plan


def group_of(collection: Any, name: str) -> Any:
    """The process group `name` (tp, cp, ...) of a Megatron pg_collection, or Megatron's global one if there is none."""
    if collection is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=[name])
    return getattr(collection, name)
