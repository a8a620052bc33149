"""Applies the patches that a command line asks for, and puts its cp_ring settings in force.

The entry modules call it before any code of Megatron runs. This module may import both the patches
and `cp_ring.megatron`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.compat import check_version
from cp_ring.megatron.flags.checks_documents import splits_packed
from cp_ring.megatron.options import Options
from cp_ring.megatron.settings import configure, flags


def install(argv: Sequence[str]) -> Options:
    """Apply the patches that the flags in `argv` ask for, and return the cp_ring settings among the
    flags.

    Applies nothing without --cp-ring, --cp-ring-beneath or --cp-ring-cpu. Raises `ConfigError` for
    a bad value, if the installed Megatron is outside the supported versions, or if there is neither
    CUDA nor --cp-ring-cpu.
    """
    config = flags(argv)
    asks = any(word.startswith("--cp-ring-certify") for word in argv)
    if asks and config.certify != "off" and not config.certifies:
        raise ConfigError(
            f"--cp-ring-certify {config.certify} examines ring attention: give --cp-ring too, or "
            "--cp-ring-certify only, which examines any attention and trains nothing"
        )
    if not (config.enabled or config.cpu or config.beneath or config.certify == "only"):
        return config
    check_version()
    if config.enabled and not config.cpu:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "--cp-ring: torch finds no CUDA device here; add --cp-ring-cpu to train on the CPU"
            )
    asked = asked_of(argv)
    whole = asked.dataloader_inter_document_masking or splits_packed(asked, config)
    configure(config, whole_rows=bool(whole))
    patches.apply_for(asked, config)
    return config


def asked_of(argv: Sequence[str]) -> Asked:
    """Read the given flags and whole numbers of a command line that Megatron has not parsed yet."""
    words: dict[str, Any] = {}
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        flag, _, value = word.partition("=")
        if flag.startswith("--"):
            words[flag[2:].replace("-", "_")] = (
                (value or after).isdecimal() and int(value or after)
            ) or True
    return Asked(argparse.Namespace(**words))


def install_for_model(args: argparse.Namespace, config: Options) -> None:
    """Apply the patches that the completed arguments need and the command line did not show.

    Layers can also come from a checkpoint (--use-checkpoint-args) or a file. Call it before a model
    is built. Raises `ConfigError` if a patch rejects the installed Megatron.
    """
    patches.apply_for(Asked(args), config, ("mtp_roll", "moe_aux_loss", "recurrent_layers"))
