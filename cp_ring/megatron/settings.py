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


def install(argv: Sequence[str]) -> ContextParallelConfig:
    """Applies the patches that the flags in `argv` ask for, and returns the settings; none without --cp-ring or --cp-ring-cpu.

    Raises `ConfigError` for a bad value, or where the installed Megatron is outside the supported versions.
    """
    config = flags(argv)
    if not (config.enabled or config.cpu):
        return config
    check_version()
    names = ["dataset_helpers", "arguments", "optimizer_step", "safe_checkpoints", "restricted_unpickling"]
    if config.cpu:
        names.insert(0, "cpu_runtime")
    if "--exit-signal-handler" in argv:
        names.append("exit_signal")
    if config.enabled:
        names += _patches_of_models(config, argv)
        names += ["certificate"] if config.certify else []
    patches = importlib.import_module("cp_ring.patches")
    for name in names:
        patches.get(name).apply()
    configure(config, whole_rows=INTER_DOCUMENT in argv)
    return config


def _patches_of_models(config: ContextParallelConfig, argv: Sequence[str]) -> list[str]:
    """The patches that the models of a job with ring attention need."""
    given = {word.split("=")[0] for word in argv}
    wanted = {
        "core_attention": True,
        "recompute": config.recompute == "keep",
        "rotary_layout": config.layout != "zigzag",
        "rotary_documents": INTER_DOCUMENT in argv,
        "document_mask": config.document_mask,
        "loss_bias": PER_TOKEN_LOSS not in argv,
        "mtp_roll": "--mtp-num-layers" in given,
        "moe_aux_loss": "--num-experts" in given,
    }
    return [name for name, needed in wanted.items() if needed]


def make_layout(name: str, n: int, cp: int) -> Layout:
    """The layout called `name` of `n` tokens over `cp` ranks."""
    return _LAYOUTS[name](n, cp)


@functools.lru_cache(maxsize=64)
def make_plan(mask: str, n: int, cp: int, layout: str, route: str, window: tuple[int, int] = (-1, -1)) -> RingPlan:
    """The verified plan for mask kind `causal` or `no_mask` over `n` tokens; made once per process and shared by all layers.

    `window` is how many keys before and after its own position a query sees; -1 is any number.
    """
    plan = RingPlan.build(_MASKS[mask](n, window=window), make_layout(layout, n, cp), route=route)
    plan.verify()
    return plan


def group_of(collection: Any, name: str) -> Any:
    """The process group `name` (tp, cp, ...) of a Megatron pg_collection, or Megatron's global one if there is none."""
    if collection is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=[name])
    return getattr(collection, name)
