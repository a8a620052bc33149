"""Applies the patches that a command line asks for, and puts its cp_ring settings in force.

Called by the entry modules before anything of Megatron runs. It is above the patches and `cp_ring.megatron`, and knows both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cp_ring import patches
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.megatron.compat import check_version
from cp_ring.megatron.settings import INTER_DOCUMENT, PER_TOKEN_LOSS, SFT, configure, current, flags


def install(argv: Sequence[str]) -> ContextParallelConfig:
    """Applies the patches that the flags in `argv` ask for, and returns the cp_ring settings among them.

    Applies nothing without --cp-ring or --cp-ring-cpu. Raises `ConfigError` for a bad value, or if the installed Megatron is
    outside the supported versions.
    """
    config = flags(argv)
    if not (config.enabled or config.cpu):
        return config
    check_version()
    names = ["dataset_helpers", "data_files", "arguments", "optimizer_step", "tensorboard"]
    names += ["safe_checkpoints", "restricted_unpickling"]
    if config.cpu:
        names.insert(0, "cpu_runtime")
    if "--exit-signal-handler" in argv:
        names.append("exit_signal")
    if config.enabled:
        names += _patches_of_models(config, argv)
        names += ["certificate"] if config.certify != "off" else []
    for name in names:
        patches.get(name).apply()
    configure(config, whole_rows=INTER_DOCUMENT in argv or splits_packed_batches(config, argv))
    return config


def _patches_of_models(config: ContextParallelConfig, argv: Sequence[str]) -> list[str]:
    """The patches that the models of a job with ring attention need."""
    given = {word.split("=")[0] for word in argv}
    wanted = {
        "core_attention": True,
        "latent_gradients": True,
        "recompute": config.recompute == "keep",
        "rotary_layout": config.layout != "zigzag" or bool(config.kinds),
        "recurrent_layers": bool(given & {"--hybrid-layer-pattern", "--hybrid-override-pattern"}),
        "rotary_documents": INTER_DOCUMENT in argv or splits_packed_batches(config, argv),
        "sft_batches": SFT in argv and not config.document_mask,
        "packed_batches": splits_packed_batches(config, argv),
        "document_mask": config.document_mask or bool(config.kinds),
        "microbatch_order": config.balance_microbatches,
        "loss_bias": PER_TOKEN_LOSS not in argv,
        "loss_chunks": config.loss_chunk > 0,
        "mtp_roll": "--mtp-num-layers" in given,
        "moe_aux_loss": "--num-experts" in given,
        "fsdp2": "--use-torch-fsdp2" in given,
        "megatron_fsdp": "--use-megatron-fsdp" in given,
    }
    return [name for name, needed in wanted.items() if needed]


def splits_packed_batches(config: ContextParallelConfig, argv: Sequence[str]) -> bool:
    """Whether packed batches of a script are split by the balanced layout."""
    packed = SFT in argv or INTER_DOCUMENT in argv
    return packed and config.layout == "balanced" and not config.document_mask


def install_for_model(args: argparse.Namespace) -> None:
    """Applies the patches that the completed arguments ask for and the command line did not show.

    Layers can also come from a checkpoint (--use-checkpoint-args) or a file. Call it before a model is built. Raises
    `ConfigError` where a patch rejects the installed Megatron.
    """
    wanted = {
        "mtp_roll": getattr(args, "mtp_num_layers", None),
        "moe_aux_loss": getattr(args, "num_experts", None),
        "recurrent_layers": getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None),
    }
    for name, needed in wanted.items():
        if needed:
            patches.get(name).apply()


def log_steps() -> None:
    """Makes Megatron's training loop record each logged step and the times of sampled ones.

    Where the patch does not support the installed version, nothing is recorded; a line says so if times are asked for.
    """
    step_line = patches.get("step_line")
    if not step_line.rejection():
        step_line.apply()
    elif current().trace:
        raise ConfigError(f"--cp-ring-trace {current().trace}: {step_line.rejection()}")
    elif current().timing:
        print(f"cp_ring: warning: --cp-ring-timing records nothing here: {step_line.rejection()}", file=sys.stderr, flush=True)
