"""What ring attention rejects of flags about layers, graphs, documents and codecs; see `rules`."""

from __future__ import annotations

import argparse
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags.layer_pattern import SPARSE, VARIANTS
from cp_ring.megatron.flags.rule import Job, Rule, check_rules

DOCUMENT_FLAGS = (
    "--sft|--dataloader-inter-document-masking|--cp-ring-document-mask|--cp-ring-mask-kinds"
)
_DOCUMENTS_IN_ROWS = DOCUMENT_FLAGS.partition("|")[2]  # of --sft each is split by itself


WINDOWS = (
    Rule(lambda job: job.window_size is not None
         and (len(job.window_size) != 2
              or any(side != int(side) or side < -1 for side in job.window_size)),
         "{--window-size}: give two integers, the numbers of keys before and after a query, each "
         "-1 (all) or more", example="--window-size=-2,0"),
    Rule(lambda job: len(job.window_size or ()) == 2 and job.window_size[1] > 0,
         "{--window-size}: a causal layer sees nothing after its own position",
         "give {window_size[0]},0",
         example="--window-size 16,4"),
)  # fmt: skip


_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def check_layer(config: Any, layer_number: int, attention_type: str) -> None:
    """Raises `ConfigError` for core attention that ring attention does not replace."""
    if attention_type != "self":
        raise ConfigError(
            f"--cp-ring supports self attention; layer {layer_number} is {attention_type} attention"
        )
    softmax_type = config.softmax_type
    if softmax_type not in _SOFTMAX_TYPES:
        raise ConfigError(
            f"--cp-ring supports --softmax-type {', '.join(_SOFTMAX_TYPES)}, not {softmax_type}"
        )
    if getattr(config, "fp8_dot_product_attention", False) or getattr(
        config, "fp8_multi_head_attention", False
    ):
        raise ConfigError(
            "--cp-ring does not support fp8_dot_product_attention and fp8_multi_head_attention: "
            "switch them off"
        )
    if getattr(config, "attn_logit_softcapping", None):  # of Megatron after 0.20
        raise ConfigError("--cp-ring does not support attn_logit_softcapping")


def check_window(window: Any, causal: bool) -> None:
    """Raises `ConfigError` unless `window` is (left, right), each -1 or more, and right at most 0
    where the mask is causal.
    """
    check_rules(Job(argparse.Namespace(window_size=window)), WINDOWS[: 1 + causal])


SPARSE_RULES = (
    Rule(lambda job: SPARSE in job.letters and (job.holds(_DOCUMENTS_IN_ROWS)
         or (job.reorders and job["--cp-ring-layout"])
         or (job.own.wire not in ("auto", "plain", "latent") and job["--cp-ring-wire"])),
         "{pattern}: sparse attention does not support {found}",
         "it is split with --cp-ring-layout zigzag, as Megatron splits it",
         example="--experimental-attention-variant dsa --cp-ring-layout balanced / "
                 "--experimental-attention-variant dsa --cp-ring-document-mask --sft / "
                 "--experimental-attention-variant dsa --cp-ring-wire int8 / "
                 "--hybrid-layer-pattern D- --cp-ring-layout balanced"),
    Rule(lambda job: SPARSE in job.letters
         and job.holds("--dsa-indexer-topk-freq>1 --pipeline-model-parallel-size>1")
         and (job.recomputes_attention or job.recompute_granularity == "full"),
         "{--dsa-indexer-topk-freq} with {--pipeline-model-parallel-size} and "
         "{--recompute-granularity}: a recomputed layer would share the selection of a later "
         "microbatch", "leave out one of them",
         "Megatron keeps one selection for each layer, that of the last microbatch",
         "--experimental-attention-variant dsa --dsa-indexer-topk-freq 2 --num-layers 4 "
         "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1"),
    Rule(lambda job: SPARSE in job.letters and job.cp > 1 and job.dsa_indexer_loss_coeff
         and not job.calculate_per_token_loss,
         "{pattern} with {--context-parallel-size} and a loss of the indexer needs "
         "--calculate-per-token-loss",
         why="without it Megatron's gradients of that loss depend on the number of ranks",
         example="--experimental-attention-variant dsa --context-parallel-size 2 "
                 "--cp-comm-type all_gather --dsa-indexer-loss-coeff 0.01"),
)  # fmt: skip

ATTENTION = (
    Rule("--attention-dropout", "--cp-ring does not support {--attention-dropout}",
         "give --attention-dropout 0",
         "no GPU kernel draws the same dropout at any context parallel size; Megatron's default is "
         "0.1",
         "--attention-dropout 0.1"),
    Rule("--qk-clip|--log-max-attention-logit !--bf16|--fp16",
         "{found} needs --bf16 or --fp16: Megatron looks for the layers in the wrapper of such "
         "models",
         example="--qk-clip"),
    Rule("--qk-clip --tensor-model-parallel-size>1 !--multi-latent-attention",
         "--qk-clip with {--tensor-model-parallel-size} needs --multi-latent-attention: Megatron "
         "clips the weights of other layers as if a rank had all heads",
         "leave it out, or give --tensor-model-parallel-size 1",
         "`clip_qk` of megatron-core up to 0.19 fails for such layers",
         "--qk-clip --bf16 --tensor-model-parallel-size 2"),
    Rule(lambda job: job.qk_clip and not (0 < job.qk_clip_alpha < 1 and job.qk_clip_threshold > 0),
         "{--qk-clip-alpha} must be between 0 and 1, {--qk-clip-threshold} above 0",
         why="Megatron demands it too", example="--qk-clip --bf16 --qk-clip-alpha 2"),
    *WINDOWS,
    Rule(lambda job: job.window_size and isinstance(job.window_attn_skip_freq, list)
         and len(job.window_attn_skip_freq) < job.num_layers and len(job.window_attn_skip_freq),
         "--window-attn-skip-freq has {found} entries for {--num-layers}",
         "give one entry for each layer",
         example="--window-size 16,0 --window-attn-skip-freq [1]"),
    Rule("--window-attn-skip-freq<1 --window-size", "{found} must be at least 1",
         example="--window-size 16,0 --window-attn-skip-freq 0"),
    Rule("--hybrid-context-parallel|--dynamic-context-parallel",
         "--cp-ring does not support a context-parallel size per sequence; --sft with "
         "--cp-ring-layout balanced shares the work of short documents instead",
         "leave out {found}",
         example="--hybrid-context-parallel"),
    Rule("--cp-partition-mode !--cp-partition-mode=zigzag",
         "--cp-ring does not support {--cp-partition-mode}", "give zigzag",
         "--cp-ring-layout says which rank holds which tokens"),
    Rule(lambda job: job.experimental_attention_variant not in (None, *VARIANTS),
         "--cp-ring does not support {--experimental-attention-variant}", "leave it out"),
    Rule("--mtp-hsm", "--cp-ring does not support {found}", "leave it out",
         "each rank shifts and mixes the hidden states of its own tokens by random numbers"),
    Rule("--use-megatron-fsdp --megatron-fsdp-version>1",
         "--cp-ring does not support {--megatron-fsdp-version}", "give 1",
         "this version of Megatron's FSDP has no context parallelism"),
    *SPARSE_RULES,
    Rule("--use-kitchen-attention", "--cp-ring does not support --use-kitchen-attention",
         "leave it out", example="--use-kitchen-attention"),
    Rule("--batch-invariant-mode",
         "--cp-ring does not support kernels that are invariant to the batch",
         "leave out {found}", example="--batch-invariant-mode"),
    Rule("graphs_of_attention",
         "--cp-ring does not support {found}, which puts attention into a CUDA graph",
         "leave it out, or give --cuda-graph-impl transformer_engine with {graph_modules} mlp",
         "each microbatch has a plan of its own, and a graph repeats one",
         "--cuda-graph-impl local / --cuda-graph-impl transformer_engine / --enable-cuda-graph / "
         "--external-cuda-graph / --cuda-graph-impl local --cuda-graph-scope mlp / "
         "--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp / --cuda-graph-scope "
         "full_iteration"),
    Rule(f"{DOCUMENT_FLAGS} --overlap-moe-expert-parallel-comm",
         "--overlap-moe-expert-parallel-comm does not support {found}: Megatron's scripts do not "
         "hand documents to the layers of this schedule", "leave out either",
         example="--overlap-moe-expert-parallel-comm --cp-ring-document-mask"),
    Rule(lambda job: job.attention_output_gate and "core_attn" in job.moved_to_host,
         "{moved_to_host} with --attention-output-gate: Megatron frees the memory of values, in "
         "which the gate lies too, before it uses the gate", "leave core_attn out",
         example="--attention-output-gate --fine-grained-activation-offloading "
         "--offload-modules core_attn"),
    Rule("--position-embedding-type=relative",
         "--cp-ring does not support an attention bias: {found} makes one",
         why="Megatron gives biases as a tensor of all scores; RoPE and learned positions need "
             "none",
             example="--position-embedding-type relative"),
)  # fmt: skip

_STATES = (
    Rule(lambda job: (kinds := job.recurrent_with("states")) and (
             ("mamba" in kinds and job.use_mamba_mem_eff_path is False
              and "--disable-mamba-mem-eff-path") or job.graphs
             or (job.deterministic_mode and "--deterministic-mode")),
         "--cp-ring-recurrent states does not support {found} with the {recurrent} layers of "
         "{pattern}", "leave it out, or give heads",
         "these kernels take no states, and no GPU has shown states in CUDA graphs",
         "--cp-ring-recurrent states --hybrid-layer-pattern G*- --deterministic-mode / "
         "--cp-ring-recurrent states --hybrid-layer-pattern M*- --disable-mamba-mem-eff-path"),
)  # fmt: skip
"""What the ranks of recurrent layers need to pass states."""


def _undivided_heads(job: Job) -> str:
    """Heads of recurrent layers that the context-parallel ranks cannot share, "" where they can."""
    for kind in job.recurrent_with("heads"):
        heads = job.linear_num_key_heads or 16
        if kind == "mamba":
            heads = job.mamba_num_heads or 2 * job.hidden_size // (job.mamba_head_dim or 64)
        if heads // job.tp % job.cp:
            return f"{heads // job.tp} heads of the {kind} layers"
    return ""


def _uneven_rows(job: Job) -> bool:
    """Whether a rank holds the tokens of two rows or more, but not of whole ones."""
    parts = job.cp * (job.tensor_model_parallel_size if job.sequence_parallel else 1)
    rows = job.micro_batch_size or 1
    return job.cp > 1 and rows // parts > 1 and rows % parts > 0


DOCUMENTS = (
    Rule(_undivided_heads,
         "{pattern}: the {found} do not divide among {cp} ranks",
         "give --cp-ring-recurrent states",
         "with heads each rank holds all tokens of some heads",
         "--hybrid-layer-pattern G*- --context-parallel-size 4 --linear-num-key-heads 2"),
    Rule(lambda job: job.cp > 1 and "seq_aux_loss" in str(job.moe_router_load_balancing_type)
         and not job.own.document_mask
         and job.holds("--dataloader-inter-document-masking --micro-batch-size>1"),
         "{found} --moe-router-load-balancing-type seq_aux_loss: Megatron takes the tokens of a "
         "rank for whole rows", "give --micro-batch-size 1, or aux_loss",
         "a rank holds parts of all rows", "--context-parallel-size 2 --micro-batch-size 2 "
         "--dataloader-inter-document-masking --num-experts 4 "
         "--moe-router-load-balancing-type seq_aux_loss"),
    Rule(lambda job: job.num_experts and not job.own.document_mask and _uneven_rows(job)
         and job.holds("--dataloader-inter-document-masking"),
         "{found} with --num-experts and --context-parallel-size {cp}: Megatron's layers of "
         "experts divide the tokens of a rank into whole rows",
         "give --micro-batch-size 1", "a rank holds parts of all rows",
         "--context-parallel-size 2 --micro-batch-size 5 --dataloader-inter-document-masking "
         "--num-experts 4"),
    Rule(lambda job: job.recurrent and next((kind for kind in job.own.kinds if kind not in (
             "documents", "causal")), ""),
         "--cp-ring-mask-kinds {found} does not reach the {recurrent} layers of {pattern}, whose "
         "state runs along the sequence", "they support documents and causal",
         "a state has no other mask, and no branches",
         "--cp-ring-mask-kinds images --hybrid-layer-pattern M*- / "
         "--cp-ring-mask-kinds tree --hybrid-layer-pattern M*-"),
    Rule(lambda job: "M" in job.letters and job.use_mamba_mem_eff_path is False
         and job.holds(DOCUMENT_FLAGS),
         "--disable-mamba-mem-eff-path: the Mamba layers of {pattern} then have no documents "
         "(Megatron supports them on the other path alone)", "leave it out",
         example="--cp-ring-document-mask --hybrid-layer-pattern M*- --disable-mamba-mem-eff-path"),
    Rule(lambda job: "G" in job.letters and job.deterministic_mode and job.holds(DOCUMENT_FLAGS),
         "--deterministic-mode: the gated delta net layers of {pattern} then have no documents "
         "(fla's kernels have them, which are not deterministic)", "leave it out",
         example="--cp-ring-mask-kinds documents --hybrid-layer-pattern G*- --deterministic-mode"),
    *_STATES,
    Rule("--cp-ring-mask-kinds --cp-ring-document-mask",
         "--cp-ring-mask-kinds and --cp-ring-document-mask are mutually exclusive (both define the "
         "mask)",
         "give only the former, and Mask.documents in the batches",
         example="--cp-ring-mask-kinds images --cp-ring-document-mask"),
    Rule("--cp-ring-mask-kinds --dataloader-inter-document-masking",
         "--cp-ring-mask-kinds and --dataloader-inter-document-masking are mutually exclusive "
         "(both define the mask)",
         "give only one",
         example="--cp-ring-mask-kinds images --dataloader-inter-document-masking"),
    Rule("--sft --dataloader-inter-document-masking",
         "--sft and --dataloader-inter-document-masking name two kinds of data sets",
         "give only one",
         example="--sft --dataloader-inter-document-masking"),
    Rule("--cp-ring-document-mask --sft --mock-data", "--sft needs conversations",
         "give --data-path FILE.jsonl instead of --mock-data", "mock data has none",
         "--cp-ring-document-mask --sft"),
    Rule("--reset-attention-mask !masks_documents",
         "--reset-attention-mask makes masks of s x s tokens",
         "give --cp-ring-document-mask instead", "stock Megatron builds dense masks for documents",
         "--reset-attention-mask"),
    Rule("--defer-embedding-wgrad-compute --cp-ring-loss-chunk",
         "--cp-ring-loss-chunk does not support {found}, which needs all logits at once",
         "leave out either",
         "it computes the loss in parts",
         "--cp-ring-loss-chunk 8 --defer-embedding-wgrad-compute"),
)  # fmt: skip

LATENT = (
    Rule("!--multi-latent-attention", "{--cp-ring-wire} needs --multi-latent-attention",
         "give it, or --cp-ring-wire plain"),
    Rule("ulysses>1",
         "{--cp-ring-wire} does not support --cp-ring-heads {ulysses} or --cp-comm-type a2a",
         "give --cp-ring-wire plain", "the MLA latent has no head dimension to split"),
    Rule("--fp8-format|--fp4-format|--delay-wgrad-compute|--use-megatron-fsdp|--use-torch-fsdp2|"
         "--cache-mla-latents", "{--cp-ring-wire} does not support {found}",
         "leave it out, or give --cp-ring-wire plain"),
    Rule("recomputes_attention",
         "{--cp-ring-wire} does not support --recompute-granularity selective of core_attn, which "
         "hides where keys come from",
         "leave core_attn out of --recompute-modules, or give --cp-ring-wire plain"),
)  # fmt: skip
"""Of layers whose latents travel."""
