"""Which of Megatron's features ring attention supports. Each check raises `ConfigError` with a line that names the flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from cp_ring.config import ContextParallelConfig, choices
from cp_ring.errors import ConfigError
from cp_ring.megatron import comm_types, compat, graphs
from cp_ring.megatron.layer_pattern import RECURRENT, pattern_of, shown_pattern
from cp_ring.megatron.rejection import note
from cp_ring.megatron.settings import current


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron that ring attention rejects.

    name, flag: Megatron's argument and its flag.
    what: the feature, with the reason or what to do instead.
    untried: its name for --cp-ring-allow-untried, which accepts it, if ring attention is written for it.
    """

    name: str
    flag: str
    what: str
    untried: str = ""


_GRAPHS = Feature("cuda_graph_impl", "--cuda-graph-impl", "CUDA graphs that hold attention", "cuda-graphs")
_VARIANT = "other attention variants"

_REJECTED = (
    Feature(
        "hybrid_context_parallel",
        "--hybrid-context-parallel",
        "a context-parallel size per sequence; --sft with --cp-ring-layout balanced shares the work of short documents instead",
    ),
    Feature("experimental_attention_variant", "--experimental-attention-variant", _VARIANT),
    Feature("use_kitchen_attention", "--use-kitchen-attention", _VARIANT),
    Feature("batch_invariant_mode", "--batch-invariant-mode", "kernels that are invariant to the batch"),
    Feature(
        "overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", "two microbatches at a time", "moe-overlap"
    ),
)


def check_attention(args: argparse.Namespace) -> None:
    """Checks that the flags ask for nothing that ring attention does not support."""
    check_dropout(args)
    _check_logits(args)
    if len(comm_types.types_by_layer(args)) > 1:
        compat.check_comm_types_by_layer()
    check_windows(args)
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    if backend != "auto":
        note(f"--attention-backend {backend} has no effect on ring attention: --cp-ring-kernel chooses its kernel")
    _check_features(args)
    _check_offload(args)
    _check_sharded(args)
    if getattr(args, "position_embedding_type", None) == "relative":
        raise ConfigError("--cp-ring does not support an attention bias: --position-embedding-type relative makes one")


def _check_sharded(args: argparse.Namespace) -> None:
    """Checks that sharded parameters can be trained, and their checkpoints written, verified and resumed."""
    if getattr(args, "use_torch_fsdp2", False):
        _check_torch_fsdp2(args)
    if getattr(args, "use_megatron_fsdp", False):
        _check_megatron_fsdp(args)


def _check_torch_fsdp2(args: argparse.Namespace) -> None:
    if getattr(args, "ckpt_format", "") == "torch_dcp":
        raise ConfigError("--ckpt-format torch_dcp has no manifest by which a checkpoint is verified: give torch_dist")
    version = compat.megatron_version()
    if getattr(args, "load", None) and version and Version(version) < Version("0.19.dev0"):
        raise ConfigError(f"--load with --use-torch-fsdp2 needs megatron-core 0.19: {version} does not resume as the job was")
    recurrent = [kind for letter, kind in RECURRENT.items() if letter in pattern_of(args)]
    if recurrent and (stored := _stored(args)):
        raise ConfigError(
            f"{stored} with --use-torch-fsdp2 and the {recurrent[0]} layers of {shown_pattern(args)}: Megatron takes whole weights "
            "for the parts of a rank, and its saves fail; leave out either"
        )


def _stored(args: argparse.Namespace) -> str:
    """--save or --load, whichever the job has; "" for none."""
    return next((f"--{name}" for name in ("save", "load") if getattr(args, name, None)), "")


def _check_megatron_fsdp(args: argparse.Namespace) -> None:
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} with --use-megatron-fsdp: Megatron's FSDP takes all ranks of the job for "
            "those of one stage; leave out either"
        )
    if getattr(args, "async_save", False):
        raise ConfigError("--async-save with --use-megatron-fsdp writes checkpoints without a manifest: leave out --async-save")
    stored = _stored(args)
    strategy = getattr(args, "data_parallel_sharding_strategy", "")
    if stored and strategy in ("optim", "optim_grads"):
        raise ConfigError(
            f"{stored} with --use-megatron-fsdp needs --data-parallel-sharding-strategy optim_grads_params: with {strategy} "
            "Megatron takes whole weights for the parts of a rank, and its saves fail"
        )
    if stored and getattr(args, "swiglu", False) and not (args.bf16 or args.fp16):
        raise ConfigError(
            f"{stored} with --use-megatron-fsdp and --swiglu needs --bf16 or --fp16: Megatron looks for the weights in the "
            "wrapper of such models"
        )


def _check_logits(args: argparse.Namespace) -> None:
    """Checks that Megatron can find the layers whose largest logits it wants, and clip their weights."""
    asked = [name for name in ("qk_clip", "log_max_attention_logit") if getattr(args, name, False)]
    if asked and not (args.bf16 or args.fp16):
        flag = "--" + asked[0].replace("_", "-")
        raise ConfigError(f"{flag} needs --bf16 or --fp16: Megatron looks for the layers in the wrapper of such models")
    tp = args.tensor_model_parallel_size
    if "qk_clip" in asked and tp > 1 and not getattr(args, "multi_latent_attention", False):
        raise ConfigError(
            f"--qk-clip with --tensor-model-parallel-size {tp} needs --multi-latent-attention: Megatron clips the weights of "
            "other layers as if a rank had all heads; leave it out, or give --tensor-model-parallel-size 1"
        )


def _check_features(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a feature of `_REJECTED`, and for one that no GPU has shown yet unless it is allowed."""
    for feature in _REJECTED:
        value = getattr(args, feature.name, None)
        if value and value != "none":
            shown = [feature.flag] if value is True else [feature.flag, *map(str, value if isinstance(value, list) else [value])]
            _reject(args, feature, " ".join(shown))
    if graphs.hold_attention(args):
        _reject(args, _GRAPHS, graphs.given(args))
        graphs.check(args)
    graphs.check_others(args)
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        _check_overlap(args)


def _reject(args: argparse.Namespace, feature: Feature, shown: str) -> None:
    if not feature.untried:
        raise ConfigError(f"--cp-ring does not support {feature.what}: leave out {shown}")
    flag, allowed = ContextParallelConfig.flag("allow_untried"), getattr(args, "cp_ring_allow_untried", current().allow_untried)
    if feature.untried not in allowed.split(","):
        raise ConfigError(
            f"{shown}: no GPU run has shown {feature.what} with ring attention yet: leave it out, or accept it by "
            f"{flag} {feature.untried}"
        )
    note(f"warning: {shown}: no GPU run has shown {feature.what} with ring attention yet ({flag} {feature.untried})")


def _check_overlap(args: argparse.Namespace) -> None:
    """Checks that microbatches carry nothing that Megatron's schedule of two microbatches at a time does not hand to layers."""
    flag = graphs.changing(args)
    if flag:
        raise ConfigError(
            f"--overlap-moe-expert-parallel-comm does not support {flag}: Megatron's scripts do not hand documents to the layers "
            "of this schedule; leave out either"
        )


def _check_offload(args: argparse.Namespace) -> None:
    """Checks that one feature at most moves the tensors of attention to host memory, and that it has something to move."""
    megatrons = _host_memory(args)
    if megatrons and "core_attn" in megatrons and getattr(args, "attention_output_gate", False):
        raise ConfigError(
            f"{megatrons} with --attention-output-gate: Megatron frees the memory of values, in which the gate lies too, before "
            "it uses the gate: leave core_attn out"
        )
    if not getattr(args, "cp_ring_offload", current().offload):
        return
    if megatrons:
        raise ConfigError(f"--cp-ring-offload and {megatrons} move the same tensors to host memory: give one of them")
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    if getattr(args, "recompute_granularity", None) == "selective" and "core_attn" in modules:
        raise ConfigError(
            "--cp-ring-offload moves q, k and v, which --recompute-granularity selective of core_attn holds on the device: leave "
            "core_attn out of --recompute-modules"
        )


def _host_memory(args: argparse.Namespace) -> str:
    """Megatron's flag that moves tensors of attention to host memory, "" without one."""
    modules = getattr(args, "offload_modules", None) or []
    of_attention = [module for module in modules if module in ("core_attn", "attn_proj")]
    if getattr(args, "fine_grained_activation_offloading", False) and of_attention:
        return f"--offload-modules {' '.join(of_attention)}"
    layers = getattr(args, "cpu_offloading_num_layers", 0)
    return f"--cpu-offloading-num-layers {layers}" if layers else ""


@contextmanager
def logits_without_te(args: argparse.Namespace) -> Iterator[None]:
    """Within the block `args` ask for no attention logits: Megatron checks for TransformerEngine, which ring attention does not
    need for them. Raises `ConfigError` for what else Megatron would check."""
    wanted = {name: getattr(args, name, False) for name in ("qk_clip", "log_max_attention_logit")}
    if wanted["qk_clip"] and not (0 < args.qk_clip_alpha < 1 and args.qk_clip_threshold > 0):
        raise ConfigError(
            f"--qk-clip-alpha {args.qk_clip_alpha} must be between 0 and 1, --qk-clip-threshold {args.qk_clip_threshold} above 0"
        )
    for name in wanted:
        setattr(args, name, False)
    try:
        yield
    finally:
        vars(args).update(wanted)


def check_dropout(args: argparse.Namespace) -> None:
    """Checks that the kernel supports attention dropout."""
    named = getattr(args, "cp_ring_kernel", None) or current().kernel
    if not args.attention_dropout or named not in choices("kernel"):
        return
    import torch  # not at the top: most early checks do without

    from cp_ring.kernels import supports_dropout

    if torch.cuda.is_available() if named == "auto" else not supports_dropout(named):
        raise ConfigError(
            f"--cp-ring-kernel {named} does not support --attention-dropout {args.attention_dropout}, which must be the same at "
            "any context parallel size: give --attention-dropout 0, or a kernel that does (cpu, reference)"
        )


def check_windows(args: argparse.Namespace) -> None:
    """Checks that --window-size is a window, and that --window-attn-skip-freq fits --num-layers."""
    window, frequency = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    if window is None:
        return
    check_window(window, causal=True)
    if isinstance(frequency, list) and len(frequency) < args.num_layers:
        raise ConfigError(f"--window-attn-skip-freq has {len(frequency)} entries for --num-layers {args.num_layers}")
    if isinstance(frequency, int) and frequency < 1:
        raise ConfigError(f"--window-attn-skip-freq {frequency} must be at least 1")


def check_window(window: Any, causal: bool) -> None:
    """Raises `ConfigError` unless `window` is (left, right), each -1 or more, and right at most 0 where the mask is causal."""
    shown = f"--window-size {window}"
    if len(window) != 2 or any(side != int(side) or side < -1 for side in window):
        raise ConfigError(f"{shown}: give two integers, the numbers of keys before and after a query, each -1 (all) or more")
    if causal and window[1] > 0:
        raise ConfigError(f"{shown}: a causal layer sees nothing after its own position; give {window[0]},0")
