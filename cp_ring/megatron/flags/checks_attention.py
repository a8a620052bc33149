"""Rejects attention features of Megatron that ring attention does not support: windows, CUDA
graphs, variants.
"""

from __future__ import annotations

import re

from cp_ring.megatron.adapter.asked import Asked, Check, window_problem
from cp_ring.megatron.flags.checks_documents import documents_flag
from cp_ring.megatron.flags.layer_pattern import SPARSE, VARIANTS, letters_of, shown_pattern
from cp_ring.megatron.options import Options

_GRAPHED_ALONE = {"moe_router", "moe_preprocess", "mamba"}
# modules that TransformerEngine's graphs can hold without attention
_GRAPHED_BY_TE = {"mlp", "moe"}
# graphs of single layers that get no mask of s x s tokens
_BY_LAYER = ("--cuda-graph-impl local", "--enable-cuda-graph")
# what Python does at each call, and what was not tried
_LOST_IN_GRAPHS = (
    "qk_clip", "log_max_attention_logit", "cp_ring_debug", "cp_ring_timing",
    "experimental_attention_variant",
)  # fmt: skip


def dropout(args: Asked, options: Options) -> str | None:
    """Reject dropout: no GPU kernel draws the same dropout at every context parallel size."""
    if args.attention_dropout:
        also = " without --use-checkpoint-args" * bool(args.use_checkpoint_args)
        return (
            f"--cp-ring does not support {args.shown('attention_dropout')}: give "
            f"--attention-dropout 0{also}"
        )
    return None


def windows(args: Asked, options: Options) -> str | None:
    """Reject windows that do not say which keys each layer sees."""
    window = args.window_size
    every = args.window_attn_skip_freq
    if window is None:
        return None
    if line := window_problem(window):
        return line
    if isinstance(every, list) and len(every) < (args.num_layers or 0):
        return (
            f"--window-attn-skip-freq has {len(every)} entries for {args.shown('num_layers')}: "
            "give one entry for each layer"
        )
    if isinstance(every, int) and every < 1:
        return f"{args.shown('window_attn_skip_freq')} is no period of layers: give 1 or more"
    return None


def largest_logits(args: Asked, options: Options) -> str | None:
    """Reject largest logits of a model in float32."""
    flag = args.first("qk_clip", "log_max_attention_logit")
    if flag and not args.first("bf16", "fp16"):
        return f"{flag}: Megatron reads logits of 16-bit models alone: add --bf16"
    return None


def other_attention(args: Asked, options: Options) -> str | None:
    """Reject features that split tokens or compute attention in another way."""
    if flag := args.first("hybrid_context_parallel", "dynamic_context_parallel"):
        return (
            f"--cp-ring does not support {flag}: leave it out; one ring over all ranks needs no "
            "groups: give --context-parallel-size all of them, and --cp-ring-layout balanced"
        )
    if args.cp_partition_mode not in (None, "zigzag"):
        return f"--cp-ring does not support {args.shown('cp_partition_mode')}: give zigzag"
    if args.experimental_attention_variant not in (None, *VARIANTS):
        asked = args.shown("experimental_attention_variant")
        return f"--cp-ring does not support {asked}: leave it out"
    if args.use_megatron_fsdp and (args.megatron_fsdp_version or 1) > 1:
        return f"--cp-ring does not support {args.shown('megatron_fsdp_version')}: give 1"
    if flag := args.first("mtp_hsm", "batch_invariant_mode"):
        return f"--cp-ring does not support {flag}: leave it out"
    return None


def sparse(args: Asked, options: Options) -> str | None:
    """Reject settings that sparse attention ignores: Megatron runs it, splits its tokens by zigzag,
    and gathers all keys.
    """
    if SPARSE not in letters_of(args):
        return None
    pattern = shown_pattern(args)
    found = documents_flag(args, options, in_rows=True)
    if not options.named_layout.stock:
        found = found or f"--cp-ring-layout {options.layout}"
    if options.wire not in ("auto", "plain", "latent"):
        found = found or f"--cp-ring-wire {options.wire}"
    if found:
        return f"{pattern}: Megatron's sparse attention does not support {found}: leave it out"
    if args.cp > 1 and args.dsa_indexer_loss_coeff and not args.calculate_per_token_loss:
        return (
            f"{pattern} with {args.shown('context_parallel_size')}: the gradients of the indexer "
            "loss would depend on the number of ranks: give --calculate-per-token-loss"
        )
    return None


def graphs(args: Asked, options: Options) -> str | None:
    """Reject CUDA graphs of attention, but those of layers that Megatron makes itself where all
    microbatches have one plan, which a graph repeats.
    """
    given = args.cuda_graph_modules, args.cuda_graph_scope, args.cuda_graph_scope_deprecated
    modules = {*re.findall(r"\b[a-z]\w*", str(given))}  # names, alone or in the text of an enum
    asked = args.first("enable_cuda_graph", "external_cuda_graph")
    if args.cuda_graph_impl not in (None, "none"):
        asked = args.shown("cuda_graph_impl")
    if not asked and "full_iteration" in modules:
        asked = "--cuda-graph-impl none"
    alone = _GRAPHED_ALONE | (_GRAPHED_BY_TE if "transformer_engine" in asked else set())
    if not asked or (modules and modules <= alone):
        return None
    name = "scope" if args.cuda_graph_modules is None else "modules"
    shown = f" --cuda-graph-{name} {' '.join(sorted(modules))}" if modules else ""
    advice = f"replace it by --cuda-graph-impl local --cuda-graph-{name} attn"
    lost = documents_flag(args, options) or args.first(*_LOST_IN_GRAPHS)
    if lost := lost or (letters_of(args) and shown_pattern(args)):
        shown += f" with {lost}"
        advice = "leave out one of the two"
    elif asked in _BY_LAYER and "full_iteration" not in modules:
        return None
    return (
        f"--cp-ring does not support {asked}{shown}, which puts attention into a CUDA graph: "
        f"{advice}"
    )


def offloaded_gate(args: Asked, options: Options) -> str | None:
    """Reject offloading of gated attention: Megatron frees the values before it uses the gate,
    which shares their memory.
    """
    moved = args.fine_grained_activation_offloading and args.offload_modules
    if moved and args.attention_output_gate and "core_attn" in moved:
        return (
            f"{args.shown('offload_modules')} with --attention-output-gate: Megatron would free "
            "the gate with the values before it uses the gate: leave core_attn out"
        )
    return None


ATTENTION: tuple[Check, ...] = (
    dropout, windows, largest_logits, other_attention, sparse, graphs, offloaded_gate
)  # fmt: skip
