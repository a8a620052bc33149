"""`cp_ring.megatron.enable`: ring attention for programs that build their models themselves,
without Megatron's command line.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.megatron import program
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.compat import check_version
from cp_ring.megatron.options import Options
from cp_ring.megatron.settings import configure


def enable(
    config: Options | None = None,
    *,
    seq_length: int = 0,
    micro_batch_size: int = 1,
    packed: bool = False,
    **settings: Any,
) -> Options:
    """Turn on ring attention in every attention layer of the models that this process builds from
    now on.

        cp_ring.megatron.enable(layout="balanced", packed=True)

    Call it once on every rank, before the first model is built. It is for programs on megatron.core
    that have no command line of Megatron: a training loop of your own, Megatron Bridge, NeMo RL,
    verl. Afterwards `GPTModel`, `HybridModel` and layer specifications build ring attention where
    they would build Megatron's or TransformerEngine's; recomputed layers run the ring once; each
    configuration is checked before its model is built; and the certificate is made before the first
    model is.

    Args:
        config: the settings; or give them as keywords, with the names of `Options`.
        seq_length: tokens of a batch row, for checks and for the certificate's probes at this
            length; 0 if unknown.
        micro_batch_size: batch rows of a microbatch, for the certificate.
        packed: True if microbatches hold packed documents (`PackedSeqParams` with thd), which the
            certificate then probes.

    Returns:
        The settings in force.

    Raises:
        ConfigError: for a bad setting, one that needs Megatron's own training loop, or a Megatron
            that is not supported.
    """
    if config is not None and settings:
        raise ConfigError("cp_ring.megatron.enable takes Options or settings by name, not both")
    used = replace(config or Options.make(**settings), enabled=True)
    program.check_settings(used, seq_length)
    check_version(core_alone=True)
    patches.apply_for(Asked(argparse.Namespace(program=True, packed=packed)), used)
    configure(used, whole_rows=False, row=seq_length)
    program.begin(program.Program(seq_length, micro_batch_size, packed, used.recurrent))
    return used
