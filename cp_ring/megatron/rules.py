"""What cp_ring rejects before any process group exists: one table, of which docs and tests are
made.

Megatron rejects more, and its words are shown in one line (`rejection.megatrons_rejections`). A
rule of Megatron's stands here if it says nothing with it, or not before a rank starts, as
`cp-ring train` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cp_ring.megatron import graphs
from cp_ring.megatron.rule import Job, Rule, check_rules
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.sizes import WIRES

_DOCUMENTS = (
    "--sft|--dataloader-inter-document-masking|--cp-ring-document-mask|--cp-ring-mask-kinds"
)
_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def _contradicts_the_cpu(job: Job) -> list[str]:
    """The flag that needs CUDA with its value, and the value that does not."""
    for flag, value in (("--distributed-backend", "gloo"), ("--transformer-impl", "local")):
        if job.value(flag) != value and any(
            word == flag or word.startswith(flag + "=") for word in job.argv
        ):
            return [job[flag], value]
    return []


WITHOUT_CUDA = (
    Rule(_contradicts_the_cpu, "{found[0]} needs CUDA, and --cp-ring-cpu runs without it",
         "give {found[1]}",
         example="--distributed-backend nccl / --transformer-impl=transformer_engine"),
    Rule("--sequence-parallel !--spec",
         "--sequence-parallel needs TransformerEngine's or Apex's norms",
         "leave it out with --cp-ring-cpu", example="--sequence-parallel"),
)  # fmt: skip

COMPLETE = (
    Rule(lambda job: job.missing_sizes, "section megatron lacks {found} of the model", "give them",
         "nothing says how large it is"),
)  # fmt: skip


SIZES = (
    Rule("--tensor-model-parallel-size<1|--pipeline-model-parallel-size<1|--context-parallel-size<1|"
         "--save-interval<1|--log-interval<1", "{found} must be at least 1",
         example="--context-parallel-size 0 / --save-interval 0 / --log-interval 0"),
    Rule("--eval-interval<1 !--full-validation", "{found} must be at least 1",
         example="--eval-interval 0"),
    Rule("--seq-length%chunks",
         "{--seq-length} is not divisible by 2 x {--context-parallel-size} = {chunks}",
         "change either", "zigzag needs 2 * cp chunks of one size",
         "--context-parallel-size 4 --seq-length 60 / --context-parallel-size 2 --seq-length 2"),
    Rule("--num-experts --tensor-model-parallel-size>1 !--sequence-parallel",
         "--num-experts with {--tensor-model-parallel-size} needs --sequence-parallel",
         "Megatron requires it",
         "it needs norms of TransformerEngine or Apex",
         "--num-experts 4 --tensor-model-parallel-size 2"),
    Rule("--sequence-parallel --tensor-model-parallel-size>1 --transformer-impl=local "
         "!--spec|has_apex_norm",
         "--sequence-parallel with --transformer-impl local and {--normalization} has norms that "
         "need the whole sequence",
         "give --transformer-impl transformer_engine, or leave out --sequence-parallel",
         "local norms cannot do sequence parallelism",
         "--transformer-impl local --sequence-parallel --tensor-model-parallel-size 2"),
)  # fmt: skip
"""Not for programs: their configuration has checked its own sizes."""

MODEL = (
    Rule("--micro-batch-size<1|--global-batch-size<1|--num-attention-heads<1",
         "{found} must be at least 1",
         example="--micro-batch-size 0 / --num-attention-heads 0"),
    Rule("--num-query-groups<1 --group-query-attention", "{found} must be at least 1",
         example="--num-query-groups 0"),
    Rule("--num-attention-heads%--tensor-model-parallel-size",
         "{--num-attention-heads} is not divisible by {--tensor-model-parallel-size}",
         "change either",
         "each tensor-parallel rank needs a whole number of heads",
         "--num-attention-heads 6 --hidden-size 96 --tensor-model-parallel-size 4"),
    Rule("--hidden-size%--num-attention-heads !--kv-channels",
         "{--hidden-size} is not divisible by {--num-attention-heads}",
         "change either, or give --kv-channels",
         "a head has a whole number of channels", "--hidden-size 66"),
    Rule("--num-attention-heads%--num-query-groups --group-query-attention",
         "{--num-attention-heads} is not divisible by {--num-query-groups}", "change either",
         "each key/value head needs a whole number of query heads",
         "--num-attention-heads 8 --num-query-groups 3"),
    Rule("--num-query-groups%--tensor-model-parallel-size "
         "--tensor-model-parallel-size%--num-query-groups --group-query-attention",
         "{--num-query-groups} is neither a multiple nor a divisor of "
         "{--tensor-model-parallel-size}",
         "change either", "ranks share key/value heads evenly",
         "--num-attention-heads 6 --num-query-groups 3 --hidden-size 96 "
         "--tensor-model-parallel-size 2"),
    Rule("--global-batch-size%together !--rampup-batch-size|--decrease-batch-size-if-needed",
         "{--global-batch-size} is not divisible by {--micro-batch-size} x {data_parallel} "
         "data-parallel ranks = {together}", "change either",
         "a global batch is a whole number of microbatches on each data-parallel rank",
         "--micro-batch-size 3 --global-batch-size 6"),
    Rule(lambda job: job.together and not job.decrease_batch_size_if_needed
         and next((size for size in map(int, (job.rampup_batch_size or ())[:2]) if size % job.together), 0),
         "--rampup-batch-size {found} is not divisible by {--micro-batch-size} x {data_parallel} "
         "data-parallel ranks = {together}", "change either", "the same, of a batch size that grows",
         "--rampup-batch-size 2 4 100"),
)  # fmt: skip
"""For jobs of flags that have the sizes of their model."""


def _in_graph(when: str, reason: str, way_out: str, example: str, why: str = "") -> Rule:
    """A rule for graphs that hold attention."""
    return Rule(lambda job: job.graphs_of_attention and job.given(when),
                "{graphs} puts attention into a CUDA graph: " + reason, way_out, why,
                f"--cuda-graph-impl local --cp-ring-allow-untried cuda-graphs {example}")  # fmt: skip


def not_allowed(job: Job) -> list[str]:
    """A feature that no GPU has shown yet and that is not allowed: its flags, what it is, and its
    name.
    """
    return next(
        (found for found in untried(job) if found[2] not in job.own.allow_untried.split(",")), []
    )


def untried(job: Job) -> Iterator[list[str]]:
    """Features of the job that no GPU has shown yet, as `not_allowed` has them."""
    if job.graphs_of_attention:
        yield [job.graphs, "CUDA graphs that hold attention", "cuda-graphs"]
    if job.overlap_moe_expert_parallel_comm:
        yield ["--overlap-moe-expert-parallel-comm", "two microbatches at a time", "moe-overlap"]


UNTRIED = "{found[0]}: no GPU run has shown {found[1]} with ring attention yet"

_GRAPHS = (
    _in_graph(_DOCUMENTS,
        "{found} brings other documents or masks in each step, and a graph repeats one plan",
              "leave it out", "--cp-ring-document-mask"),
    _in_graph("--cp-ring-timing|--cp-ring-trace|--cp-ring-debug",
              "{found} looks at each hop from the host, which a graph leaves out", "leave it out",
              "--cp-ring-timing 5"),
    _in_graph("--qk-clip|--log-max-attention-logit",
              "{found} collects values in Python, which a graph leaves out", "leave it out",
              "--log-max-attention-logit --bf16"),
    _in_graph("--cp-ring-offload",
              "{found} chooses in Python what moves to host memory, which a graph leaves out",
              "leave it out",
              "--cp-ring-offload"),
    _in_graph("moved_to_host", "{moved_to_host} was not tried in a graph", "leave it out",
              "--fine-grained-activation-offloading --offload-modules core_attn"),
    _in_graph("--attention-dropout",
        "{--attention-dropout} would drop the same weights in each step",
              "give --attention-dropout 0", "--attention-dropout 0.1"),
    _in_graph("--cp-ring-kernel=cpu|--cp-ring-kernel=reference", "{found} waits for the host",
              "give a kernel for CUDA, or auto", "--cp-ring-kernel reference"),
    _in_graph("--cp-ring-wire=latent", "{found} finds latents by hooks, which a graph leaves out",
              "give plain, int8 or fp8", "--cp-ring-wire latent"),
    _in_graph("--context-parallel-size>1 --distributed-backend !--distributed-backend=nccl",
              "{--distributed-backend} cannot be captured", "give nccl", "--context-parallel-size 4"),
    _in_graph("--cuda-graph-warmup-steps<1",
              "{found} leaves no step before the capture, in which plans are proven",
              "give at least 1",
              "--cuda-graph-warmup-steps 0"),
    _in_graph("--hidden-dropout --recompute-granularity=full --cp-ring-recompute=keep",
              "{--hidden-dropout} would draw other numbers in a recomputation that keeps attention",
              "give --cp-ring-recompute replay, or --hidden-dropout 0",
              "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
              "--hidden-dropout 0.1"),
    Rule("--attention-dropout graphs",
         "{graphs}: {--attention-dropout} keeps a count among Megatron's random states, of which "
         "CUDA graphs take generators only", "give --attention-dropout 0",
         "CUDA graphs register each of these states as a generator",
         "--cuda-graph-impl local --cuda-graph-scope moe_router --attention-dropout 0.1"),
    Rule(lambda job: job.own.offload and "local" in job.graphs,
         "{graphs}: --cp-ring-offload adds hooks to layers, which Megatron's graphs reject",
         "leave it out",
         "Megatron checks each module of a layer for hooks before it replays a graph",
         "--cuda-graph-impl local --cuda-graph-scope moe_router --cp-ring-offload"),
)  # fmt: skip


def _has_no_dropout(job: Job) -> bool:
    """Whether the kernel that is named cannot draw the dropout that is asked for."""
    if not job.attention_dropout:
        return False
    # most jobs need neither here
    import torch

    from cp_ring.kernels import supports_dropout

    named = job.own.kernel
    return bool(torch.cuda.is_available() if named == "auto" else not supports_dropout(named))


WINDOWS = (
    Rule(lambda job: job.window_size is not None
         and (len(job.window_size) != 2 or any(side != int(side) or side < -1 for side in job.window_size)),
         "{--window-size}: give two integers, the numbers of keys before and after a query, each "
         "-1 (all) or more", example="--window-size=-2,0"),
    Rule(lambda job: job.window_size is not None and job.window_size[1] > 0,
         "{--window-size}: a causal layer sees nothing after its own position",
         "give {window_size[0]},0",
         example="--window-size 16,4"),
)  # fmt: skip


def check_window(window: Any, causal: bool) -> None:
    """Raises `ConfigError` unless `window` is (left, right), each -1 or more, and right at most 0
    where the mask is causal.
    """
    check_rules(Job(argparse.Namespace(window_size=window)), WINDOWS[: 1 + causal])


ATTENTION = (
    Rule(_has_no_dropout,
         "{--cp-ring-kernel} does not support {--attention-dropout}, which must be the same at "
         "any context parallel size",
         "give --attention-dropout 0, or a kernel that does (cpu, reference)",
         "only these kernels draw dropout by positions; Megatron's default is 0.1",
         "--attention-dropout 0.1 --cp-ring-kernel flash"),
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
    Rule(lambda job: len(job.comm_types) > 1 and job.before("0.17"),
         "--cp-comm-type by layer needs megatron-core 0.17; {version} gives each layer the type "
         "of the next",
         "give one type"),
    *WINDOWS,
    Rule(lambda job: job.window_size and isinstance(job.window_attn_skip_freq, list)
         and len(job.window_attn_skip_freq) < job.num_layers and len(job.window_attn_skip_freq),
         "--window-attn-skip-freq has {found} entries for {--num-layers}",
         "give one entry for each layer",
         example="--window-size 16,0 --window-attn-skip-freq [1]"),
    Rule("--window-attn-skip-freq<1 --window-size", "{found} must be at least 1",
         example="--window-size 16,0 --window-attn-skip-freq 0"),
    Rule("--hybrid-context-parallel",
         "--cp-ring does not support a context-parallel size per sequence; --sft with "
         "--cp-ring-layout balanced shares the work of short documents instead", "leave out {found}",
         example="--hybrid-context-parallel"),
    Rule("--experimental-attention-variant|--use-kitchen-attention",
         "--cp-ring does not support other attention variants", "leave out {found}",
         example="--experimental-attention-variant dsa / --use-kitchen-attention"),
    Rule("--batch-invariant-mode",
         "--cp-ring does not support kernels that are invariant to the batch",
         "leave out {found}", example="--batch-invariant-mode"),
    Rule(not_allowed, UNTRIED, "leave it out, or accept it by --cp-ring-allow-untried {found[2]}",
         "a feature of Megatron that needs a GPU, and whose code here has run with stand-ins on "
         "the CPU only",
         "--cuda-graph-impl local / --cuda-graph-impl transformer_engine / --enable-cuda-graph / "
         "--external-cuda-graph / --cuda-graph-impl local --cuda-graph-scope mlp / "
         "--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp / --cuda-graph-scope "
         "full_iteration / --overlap-moe-expert-parallel-comm / --cp-ring-allow-untried "
         "cuda-graphs --cuda-graph-impl local --overlap-moe-expert-parallel-comm"),
    *_GRAPHS,
    Rule(f"{_DOCUMENTS} --overlap-moe-expert-parallel-comm",
         "--overlap-moe-expert-parallel-comm does not support {found}: Megatron's scripts do not "
         "hand documents to the layers of this schedule", "leave out either",
         example="--overlap-moe-expert-parallel-comm --cp-ring-allow-untried moe-overlap "
         "--cp-ring-document-mask"),
    Rule(lambda job: job.attention_output_gate and "core_attn" in job.moved_to_host,
         "{moved_to_host} with --attention-output-gate: Megatron frees the memory of values, in "
         "which the gate lies too, before it uses the gate", "leave core_attn out",
         "or give --cp-ring-offload",
         "--attention-output-gate --fine-grained-activation-offloading --offload-modules core_attn"),
    Rule("--cp-ring-offload moved_to_host",
         "--cp-ring-offload and {moved_to_host} move the same tensors to host memory",
         "give one of them",
         "both would move q, k, v and out",
         "--cp-ring-offload --fine-grained-activation-offloading --offload-modules attn_norm "
         "core_attn attn_proj / --cp-ring-offload --cpu-offloading-num-layers 1"),
    Rule("--cp-ring-offload recomputes_attention",
         "--cp-ring-offload moves q, k and v, which --recompute-granularity selective of "
         "core_attn holds on the device", "leave core_attn out of --recompute-modules",
         "it frees nothing with ring attention",
         "--cp-ring-offload --recompute-granularity selective"),
    Rule("--use-torch-fsdp2 --ckpt-format=torch_dcp",
         "--ckpt-format torch_dcp has no manifest by which a checkpoint is verified",
         "give torch_dist",
         "these files are written by torch alone", "--use-torch-fsdp2 --ckpt-format torch_dcp"),
    Rule(lambda job: job.given("--load --use-torch-fsdp2") and job.before("0.19"),
         "--load with --use-torch-fsdp2 needs megatron-core 0.19: {version} does not resume as "
         "the job was",
         why="or leave it out"),
    Rule("--save|--load --use-torch-fsdp2 recurrent",
         "{found} with --use-torch-fsdp2 and the {recurrent} layers of {pattern}: Megatron takes "
         "whole weights for the parts of a rank, and its saves fail", "leave out either",
         "Megatron stores each part of the weights of these layers by itself; "
         "--use-distributed-optimizer can be stored",
         "--use-torch-fsdp2 --save x --hybrid-layer-pattern M*-"),
    Rule("--use-megatron-fsdp --pipeline-model-parallel-size>1",
         "{--pipeline-model-parallel-size} with --use-megatron-fsdp: Megatron's FSDP takes all "
         "ranks of the job for those of one stage", "leave out either",
         "its device mesh of 0.19 has no pipeline stages; --use-distributed-optimizer has",
         "--use-megatron-fsdp --pipeline-model-parallel-size 2"),
    Rule("--use-megatron-fsdp --async-save",
         "--async-save with --use-megatron-fsdp writes checkpoints without a manifest",
         "leave out --async-save", "torch writes these files, and nobody sums them",
         "--use-megatron-fsdp --async-save"),
    Rule("--save|--load --use-megatron-fsdp --data-parallel-sharding-strategy=optim|"
         "--data-parallel-sharding-strategy=optim_grads",
         "{found} with --use-megatron-fsdp needs --data-parallel-sharding-strategy "
         "optim_grads_params: with {data_parallel_sharding_strategy} Megatron takes whole weights "
         "for the parts of a rank, and its saves fail", why="or leave out --save and --load",
         example="--use-megatron-fsdp --bf16 --save x --data-parallel-sharding-strategy optim"),
    Rule("--save|--load --use-megatron-fsdp --swiglu !--bf16|--fp16",
         "{found} with --use-megatron-fsdp and --swiglu needs --bf16 or --fp16: Megatron looks "
         "for the weights in the wrapper of such models", why="or leave out --save and --load",
         example="--use-megatron-fsdp --save x"),
    Rule("--position-embedding-type=relative",
         "--cp-ring does not support an attention bias: {found} makes one",
         why="Megatron gives biases as a tensor of all scores; RoPE and learned positions need "
             "none, `ring_attention` has `alibi_slopes`",
             example="--position-embedding-type relative"),
)  # fmt: skip

DOCUMENTS = (
    Rule(lambda job: job.recurrent and next((kind for kind in job.own.kinds if kind not in (
         "documents",
         "causal")),
         ""),
         "--cp-ring-mask-kinds {found} does not reach the {recurrent} layers of {pattern}, whose "
         "state runs along the sequence", "they support documents and causal",
         "a declared mask has no meaning in them",
         "--cp-ring-mask-kinds images --hybrid-layer-pattern M*-"),
    Rule(lambda job: "G" in job.letters and job.cp > 1 and job.before("0.18"),
         "{pattern}: gated delta net layers need megatron-core 0.18 with --context-parallel-size "
         "above 1; those of {version} begin anew at each rank",
         why="older layers know nothing of context parallelism"),
    Rule(lambda job: "M" in job.letters and job.use_mamba_mem_eff_path is False and job.given(_DOCUMENTS),
         "--disable-mamba-mem-eff-path: the Mamba layers of {pattern} then have no documents "
         "(Megatron supports them on the other path alone)", "leave it out",
         example="--cp-ring-document-mask --hybrid-layer-pattern M*- --disable-mamba-mem-eff-path"),
    Rule(lambda job: "G" in job.letters and job.deterministic_mode and job.given(_DOCUMENTS),
         "--deterministic-mode: the gated delta net layers of {pattern} then have no documents "
         "(fla's kernels have them, which are not deterministic)", "leave it out",
         example="--cp-ring-mask-kinds documents --hybrid-layer-pattern G*- --deterministic-mode"),
    Rule("--cp-ring-mask-kinds --cp-ring-document-mask",
         "--cp-ring-mask-kinds and --cp-ring-document-mask both say which tokens see which",
         "give only the former, and Mask.documents in the batches",
         example="--cp-ring-mask-kinds images --cp-ring-document-mask"),
    Rule("--cp-ring-mask-kinds --dataloader-inter-document-masking",
         "--cp-ring-mask-kinds and --dataloader-inter-document-masking both say which tokens see "
         "which",
         "give only one", example="--cp-ring-mask-kinds images --dataloader-inter-document-masking"),
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
    Rule("--mtp-num-layers|--hybrid-layer-pattern|--hybrid-override-pattern|--defer-embedding-wgrad-compute "
         "--cp-ring-loss-chunk",
         "--cp-ring-loss-chunk does not support {found}, which needs all logits at once",
         "leave out either",
         "it computes the loss of a GPT model in parts",
         "--cp-ring-loss-chunk 8 --mtp-num-layers 1 / --cp-ring-loss-chunk 8 "
         "--hybrid-layer-pattern *-"),
)  # fmt: skip


TRAINING = (
    Rule(lambda job: job.train_iters and next((step for step in job.own.traced[-1:] if step > job.train_iters), 0),
         "{--cp-ring-trace}: step {found} is past the last one, {--train-iters}",
         "give an earlier step",
         example="--cp-ring-trace 8:3"),
    Rule(f"--cp-ring-balance-microbatches !{_DOCUMENTS}",
         "{found} needs batch rows of unequal work: --sft, --dataloader-inter-document-masking, "
         "--cp-ring-document-mask or --cp-ring-mask-kinds",
         why="without documents or declared masks all batch rows cost the same",
         example="--cp-ring-balance-microbatches"),
    Rule("--cp-ring-balance-microbatches !--calculate-per-token-loss",
         "{found} needs --calculate-per-token-loss: a mean of the means of microbatches depends "
         "on which batch rows share one",
         example="--cp-ring-balance-microbatches --cp-ring-document-mask"),
    Rule("--cp-ring-balance-microbatches --dataloader-type "
         "!--dataloader-type=single|--dataloader-type=cyclic",
         "{found} does not support {--dataloader-type}", "give single or cyclic",
         "only Megatron's own samplers deal out batch rows in another order",
         "--cp-ring-balance-microbatches --cp-ring-document-mask --calculate-per-token-loss "
         "--dataloader-type external"),
    Rule("--rampup-batch-size|--step-batch-size-schedule|--decrease-batch-size-if-needed "
         "--cp-ring-balance-microbatches", "--cp-ring-balance-microbatches needs steps of one size",
         "leave out {found}", "it must know the batch rows of a step in advance",
         "--cp-ring-balance-microbatches --cp-ring-document-mask --calculate-per-token-loss "
         "--decrease-batch-size-if-needed"),
)  # fmt: skip
"""For jobs that Megatron's own training loop runs, checked by the ranks."""

LAYERS = (
    Rule("--transformer-impl=transformer_engine !--spec|has_transformer_engine",
         "transformer_impl: transformer_engine (--transformer-impl; Megatron's default) needs "
         "TransformerEngine, which is not installed here",
         'pip install -e ".[te]", or give transformer_impl: local (--transformer-impl local)'),
)  # fmt: skip


def _missing_files(job: Job) -> Iterator[list[str]]:
    """A file of a data set that is named but not there, or empty: the flag with the name, the file
    and what it is.
    """
    suffixes = ("",) if job.sft else (".idx", ".bin")
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words: Sequence[str] = job.value(name) or []
        weighted = len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2]))
        for prefix, suffix in (
            (prefix, suffix)
            for prefix in (words[1::2] if weighted else words)
            for suffix in suffixes
        ):
            path = Path(prefix + suffix)
            if "://" in prefix or (job.sft and path.is_dir()):
                continue  # an object store, or what Megatron's own data set may read
            if not path.is_file() or not path.stat().st_size:
                file = "" if job.sft else f"{path} "
                yield [
                    f"--{name.replace('_', '-')} {prefix}",
                    file + ("is empty" if path.is_file() else "does not exist"),
                ]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


RING = (
    Rule("--cp-ring-document-mask|--cp-ring-mask-kinds|--cp-ring-loss-chunk|--cp-ring-balance-microbatches|"
         "--cp-ring-trace !--cp-ring", "{found} needs --cp-ring",
         example="--no-cp-ring --cp-ring-trace 1"),
)  # fmt: skip

DATA = (
    Rule(lambda job: next(_missing_files(job), None), "{found[0]}: {found[1]}",
         example="--data-path /nowhere/corpus / --train-data-path 0.5 /nowhere/a 0.5 /nowhere/b"),
)  # fmt: skip


SPLIT = (
    Rule(lambda job: next((kind for kind in job.comm_types if kind not in _TYPES), ""),
         "--cp-comm-type {found}: known are p2p, all_gather, a2a, a2a+p2p",
         example="--cp-comm-type pigeon"),
    Rule(lambda job: job.own.heads != 1 and (job.cp > 1 or job.own.heads == "auto") and next(iter(job.other_types),
         ""),
         "--cp-comm-type {found} and {--cp-ring-heads} both say which ranks exchange heads",
         "drop one",
         "--cp-ring-heads is for layers of the type p2p",
         "--context-parallel-size 4 --cp-ring-heads 2 --cp-comm-type a2a"),
    Rule(lambda job: job.gathers and job.own.route in ROUTES and ROUTES[job.own.route].own_schedule,
         "--cp-comm-type all_gather and {--cp-ring-route} exclude one another", "drop one",
         "all keys cannot arrive at one hop and be passed on",
         "--context-parallel-size 4 --cp-ring-route relay --cp-comm-type all_gather"),
    Rule("--cp-ring-schedule gathers !--cp-ring-schedule=auto|--cp-ring-schedule=gather",
         "--cp-comm-type all_gather is --cp-ring-schedule gather, not {own.schedule}", "drop one",
         "all keys arrive at one hop",
         "--context-parallel-size 4 --cp-comm-type all_gather --cp-ring-schedule ring"),
    Rule("nests !--hierarchical-context-parallel-sizes",
         "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes U R",
         "heads are exchanged among U ranks, in a ring of R members",
         example="--context-parallel-size 4 --cp-comm-type a2a+p2p"),
    Rule(lambda job: job.nests and (len(job.hierarchical_context_parallel_sizes) != 2 or job.product != job.cp),
         "{--hierarchical-context-parallel-sizes}: --cp-comm-type a2a+p2p takes 2 sizes, which "
         "multiply to {--context-parallel-size}", "change either",
         example="--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 1 2 "
                 "--cp-comm-type a2a+p2p"),
    Rule("cp%--cp-ring-heads", "{--cp-ring-heads} does not divide the {cp} context-parallel ranks",
         "change either", "the ring has members of equally many ranks",
         "--context-parallel-size 4 --cp-ring-heads 3"),
)  # fmt: skip
"""How a layer is split over the ranks: by its type, `cp_comm_type`."""

SPLITS = (
    *SPLIT,
    Rule(lambda job: job.hierarchical_context_parallel_sizes and job.product != job.cp,
         "{--hierarchical-context-parallel-sizes} multiply to {product}, not to "
         "{--context-parallel-size}",
         "change either",
         example="--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4"),
    Rule(lambda job: job.cp > 1 and job.num_layers and len(job.comm_types) not in (1, job.num_layers) and len(job.comm_types),
         "--cp-comm-type has {found} entries for {--num-layers}", "give one, or one for each layer",
         example="--context-parallel-size 4 --cp-comm-type p2p a2a a2a"),
)  # fmt: skip

MEMBERS = (
    Rule("heads_of_rank%ulysses",
         "{exchange} does not divide the {heads_of_rank} query heads of a tensor-parallel rank",
         "change either",
         "each rank that exchanges heads computes as many query heads; a2a+p2p and "
         "--cp-ring-heads exchange among fewer ranks",
         "--context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 3 --hidden-size 48 "
         "--num-query-groups 1"),
    Rule(lambda job: job.hops not in (None, job.members),
         "{--cp-ring-schedule}: {hops} hops for a ring of {members} members, of {ulysses} ranks "
         "each",
         "give a hop for each member",
         example="--context-parallel-size 4 --cp-ring-schedule 0,1,2,2 "
                 "--hierarchical-context-parallel-sizes 2 2 --cp-comm-type a2a+p2p"),
)  # fmt: skip
"""Of a layer that exchanges heads among `ulysses` ranks, in a ring of `members`."""

LATENT = (
    Rule("!--multi-latent-attention", "{--cp-ring-wire} needs --multi-latent-attention",
         "or give --cp-ring-wire plain"),
    Rule("ulysses>1",
         "{--cp-ring-wire} does not support --cp-ring-heads {ulysses} or --cp-comm-type a2a",
         "latents have no heads to exchange"),
    Rule("--fp8-format|--fp4-format|--delay-wgrad-compute|--use-megatron-fsdp|--use-torch-fsdp2|"
         "--cache-mla-latents", "{--cp-ring-wire} does not support {found}",
         "leave it out, or give --cp-ring-wire plain"),
    Rule("recomputes_attention",
         "{--cp-ring-wire} does not support --recompute-granularity selective of core_attn, which "
         "hides where keys come from",
         "leave core_attn out of --recompute-modules, or give --cp-ring-wire plain"),
    Rule("graphs_of_attention", "{--cp-ring-wire} does not support {graphs}",
         "leave it out, or give --cp-ring-wire plain"),
)  # fmt: skip
"""Of layers whose latents travel."""

DROPOUT_ON_THE_WIRE = (
    Rule(lambda job: job.attention_dropout and job.own.wire in WIRES and not WIRES[job.own.wire].plain,
         "{--cp-ring-wire} does not support {--attention-dropout}, for which positions travel "
         "with the keys",
         "give --attention-dropout 0, or --cp-ring-wire plain"),
)  # fmt: skip

PROGRAM = (
    Rule("--cp-ring-run-dir", "--cp-ring-run-dir (run_dir=) needs a job of flags",
         "steps.jsonl is written by Megatron's own training loop",
         "leave it out, or train with cp_ring.run or cp_ring.pretrain_gpt"),
    Rule("--cp-ring-balance-microbatches",
         "--cp-ring-balance-microbatches (balance_microbatches=) needs a job of flags",
         "batch rows are dealt out by Megatron's own data loaders",
         "leave it out, or train with cp_ring.run or cp_ring.pretrain_gpt"),
    *(Rule(f"--cp-ring-{name}=auto !seq_length",
           f"--cp-ring-{name} auto ({name}='auto') needs seq_length=, for which the shape is chosen")
      for name in ("route", "heads")),
    Rule("seq_length%chunks",
         "enable(seq_length={seq_length}): it is not divisible by 2 x {cp} context-parallel ranks "
         "= {chunks}",
         why="zigzag needs 2 * cp chunks of one size"),
)  # fmt: skip
"""Of `cp_ring.megatron.enable`."""

SCRIPT = (
    Rule("--cp-ring-document-mask",
         "--cp-ring-document-mask needs cp_ring.pretrain_gpt: {script} carries no document "
         "boundaries with its batches; --dataloader-inter-document-masking does",
         why="or leave it out"),
    Rule(lambda job: job.before("0.17") and job.given(
         "--sft --cp-ring --pipeline-model-parallel-size>1")
         and job.given("--pipeline-model-parallel-size>2|virtual_stages"),
         "--sft with {--pipeline-model-parallel-size}: the scripts of megatron-core {version} "
         "give middle stages no documents, so that tokens would see other documents",
         "use megatron-core 0.17, or at most 2 stages, without virtual ones"),
    Rule("--cp-ring reorders !--cp-ring-mask-kinds|splits_packed",
         "{--cp-ring-layout} needs cp_ring.pretrain_gpt: {script} splits its batches by "
         "Megatron's zigzag; balanced can split packed batches (--sft, "
         "--dataloader-inter-document-masking)",
         why="or leave it out"),
)  # fmt: skip
"""Of scripts that `cp_ring.run` runs."""

READING = (
    Rule(lambda job: job.tp > 1 and graphs.implementation(job.args) == graphs.FULL,
         "{graphs}: cp_ring.pretrain_gpt sends batches to the ranks of "
         "{--tensor-model-parallel-size} by way of the host, which no graph can hold",
         "run Megatron-LM's pretrain_gpt.py by cp_ring.run, or give --cuda-graph-impl local"),
)  # fmt: skip
"""Of the batches of `cp_ring.pretrain_gpt`."""

TABLE = {
    "Attention": WITHOUT_CUDA + LAYERS + ATTENTION + DOCUMENTS + LATENT + DROPOUT_ON_THE_WIRE,
    "Sizes": COMPLETE + SIZES + MODEL + SPLITS + MEMBERS,
    "Training": RING + TRAINING + DATA + READING + SCRIPT + PROGRAM,
}
"""All rules, by the parts of the page on troubleshooting."""
