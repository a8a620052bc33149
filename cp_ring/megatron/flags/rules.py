"""What cp_ring rejects before any process group exists: one table, of which docs and tests are
made.

Megatron rejects more, and its words are shown in one line (`rejection.megatrons_rejections`). A
rule of Megatron's stands here if it says nothing with it, or not before a rank starts, as
`cp-ring train` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import inf
from pathlib import Path

import numpy as np

from cp_ring.errors import one_line
from cp_ring.megatron.data.file_checks import problem_of_conversations, problem_of_tokens
from cp_ring.megatron.flags import implementations
from cp_ring.megatron.flags.attention_rules import (
    ATTENTION,
    DOCUMENT_FLAGS,
    DOCUMENTS,
    LATENT,
)  # fmt: skip
from cp_ring.megatron.flags.rule import Job, Rule

_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def _contradicts_the_cpu(job: Job) -> Iterator[list[str]]:
    """Each flag that needs CUDA with its value, and the value that does not."""
    for flag, value in (("--distributed-backend", "gloo"), ("--transformer-impl", "local")):
        if job.value(flag) != value and any(
            word == flag or word.startswith(flag + "=") for word in job.argv
        ):
            yield [job[flag], value]


def _why_no_kernel(job: Job) -> str:
    """Why the kernel that is asked for cannot compute on the CPU, "" where it can."""
    # heavy, and not needed by other checks
    import torch

    from cp_ring.kernels import REGISTRY

    if not job.own.enabled or job.own.kernel not in REGISTRY:
        return ""
    kernel = import_module(REGISTRY[job.own.kernel]).KERNEL
    return kernel.rejection(torch.device("cpu"), torch.float32, 64, 64) or ""


WITHOUT_CUDA = (
    Rule(_contradicts_the_cpu, "{found[0]} needs CUDA, and --cp-ring-cpu runs without it",
         "give {found[1]}",
         example="--distributed-backend nccl / --transformer-impl=transformer_engine"),
    Rule(_why_no_kernel, "{--cp-ring-kernel} cannot run on the CPU ({found})", "give auto",
         example="--cp-ring-kernel flash"),
    Rule("--sequence-parallel !--spec",
         "--sequence-parallel needs TransformerEngine's or Apex's norms",
         "leave it out with --cp-ring-cpu", example="--sequence-parallel"),
)  # fmt: skip

COMPLETE = (
    Rule(lambda job: job.missing_sizes, "section megatron lacks {found} of the model", "give them",
         "nothing says how large it is"),
    Rule("!--train-iters|--train-samples|--skip-train",
         "--train-iters must be at least 1, or --train-samples"),
    Rule(lambda job: job.lr is None and not job.skip_train, "--lr is missing", "give it"),
)  # fmt: skip


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "at least 1": (lambda x: x >= 1,
        "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
        "save-interval log-interval micro-batch-size global-batch-size num-attention-heads "
        "num-query-groups num-layers hidden-size ffn-hidden-size kv-channels seq-length "
        "max-position-embeddings num-experts moe-router-topk moe-ffn-hidden-size train-samples "
        "q-lora-rank kv-lora-rank qk-head-dim v-head-dim seed vocab-size "
        "make-vocab-size-divisible-by"),
    "at least 0": (lambda x: 0 <= x < inf,
        "lr min-lr weight-decay clip-grad init-method-std adam-eps num-workers "
        "lr-warmup-iters eval-iters train-iters qk-pos-emb-head-dim mtp-num-layers"),
    "from 0 to below 1": (lambda x: 0 <= x < 1,
        "attention-dropout hidden-dropout adam-beta1 adam-beta2 sgd-momentum "
        "lr-warmup-fraction"),
    "above 0": (lambda x: 0 < x < inf, "rotary-base rotary-percent"),
}  # fmt: skip
"""Numbers of Megatron's flags that neither its parser nor its validation limits."""


def _out_of_range(job: Job) -> Iterator[list[str]]:
    """Each flag with its value, and the range that it must be in."""
    for words, (holds, flags) in _RANGES.items():
        for flag in flags.split():
            value = job.value(f"--{flag}")
            if isinstance(value, int | float) and not holds(value):
                yield [job[f"--{flag}"], words]


SIZES = (
    Rule(_out_of_range, "{found[0]} must be {found[1]}",
         example="--context-parallel-size 0 / --micro-batch-size 0 / --attention-dropout 2 / "
                 "--lr -1 / --rotary-base 0"),
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
         and next((size for size in map(int, (job.rampup_batch_size or ())[:2])
                   if size % job.together),
                  0),
         "--rampup-batch-size {found} is not divisible by {--micro-batch-size} x {data_parallel} "
         "data-parallel ranks = {together}", "change either",
         "the same, of a batch size that grows",
         "--rampup-batch-size 2 4 100"),
)  # fmt: skip
"""For jobs of flags that have the sizes of their model."""


def _why_no_layers(job: Job) -> str:
    """Why the layers of --spec cannot be imported, "" where they can."""
    try:
        if job.spec:
            module, name = job.spec
            getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return one_line(error)
    return ""


def _unwritable_folder(job: Job) -> str:
    """Why checkpoints cannot be written to --save, "" where they can."""
    folder = str(job.save or "")
    if not folder or "://" in folder:
        return ""
    above = Path(folder).absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        return f"{above} is a file"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} cannot be written to"


TRAINING = (
    Rule(_unwritable_folder, "{--save}: {found}", "give a folder that all ranks can write to",
         "a job would train until its first save", "--save /proc/version/checkpoints"),
    Rule(lambda job: job.lr_warmup_iters and job.lr_warmup_iters >= (
         job.lr_decay_iters or job.train_iters or inf),
         "{--lr-warmup-iters} must be below --lr-decay-iters, by default --train-iters",
         "lower it", example="--lr-warmup-iters 500"),
    Rule(f"--cp-ring-balance-microbatches !{DOCUMENT_FLAGS}",
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
    Rule(_why_no_layers, "{--spec} cannot be imported: {found}",
         "give a module and the name of the layers in it",
         "Megatron would say so in its log, and train its default layers",
         "--spec no.such.module layers"),
    Rule(lambda job: job.optimizer not in (None, "adam", "sgd")
         and not find_spec("emerging_optimizers"),
         "{--optimizer} needs the package emerging_optimizers, which is not installed here",
         "give adam or sgd", example="--optimizer muon"),
    Rule("--transformer-impl=transformer_engine !--spec|has_transformer_engine",
         "transformer_impl: transformer_engine (--transformer-impl; Megatron's default) needs "
         "TransformerEngine, which is not installed here",
         'pip install -e ".[te]", or give transformer_impl: local (--transformer-impl local)'),
)  # fmt: skip


def _bad_files(job: Job) -> Iterator[list[str]]:
    """Data sets of which a file is missing, empty or cut short, or holds nothing for a part that is
    used: the flag with the name, and the problem.
    """
    suffixes = ("",) if job.sft else (".idx", ".bin")
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words: Sequence[str] = job.value(name) or []
        weighted = len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2]))
        for prefix in words[1::2] if weighted else words:
            paths = [Path(prefix + suffix) for suffix in suffixes]
            if "://" in prefix or (job.sft and paths[0].is_dir()):
                continue  # an object store, or what Megatron's own data set may read
            for path in paths:
                if not path.is_file() or not path.stat().st_size:
                    file = "" if job.sft else f"{path} "
                    yield [
                        f"--{name.replace('_', '-')} {prefix}",
                        file + ("is empty" if path.is_file() else "does not exist"),
                    ]
                    break
            else:
                split = (job.split or "969, 30, 1") if name == "data_path" else None
                problem = (
                    problem_of_conversations(prefix)
                    if job.sft
                    else problem_of_tokens(prefix, split)
                )
                if problem:
                    yield [f"--{name.replace('_', '-')} {prefix}", problem]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


RING = (
    Rule("--cp-ring-document-mask|--cp-ring-mask-kinds|--cp-ring-loss-chunk|"
         "--cp-ring-balance-microbatches !--cp-ring", "{found} needs --cp-ring",
         example="--no-cp-ring --cp-ring-loss-chunk 64"),
)  # fmt: skip

DATA = (
    Rule(_bad_files, "{found[0]}: {found[1]}",
         example="--data-path /nowhere/corpus / --train-data-path 0.5 /nowhere/a 0.5 /nowhere/b"),
)  # fmt: skip


SPLIT = (
    Rule(lambda job: next((kind for kind in job.comm_types if kind not in _TYPES), ""),
         "--cp-comm-type {found}: known are p2p, all_gather, a2a, a2a+p2p",
         example="--cp-comm-type pigeon"),
    Rule(lambda job: job.own.heads != 1 and job.cp > 1 and next(iter(job.other_types), ""),
         "--cp-comm-type {found} and {--cp-ring-heads} are mutually exclusive (both set the "
         "Ulysses degree)",
         "drop one",
         "--cp-ring-heads is for layers of the type p2p",
         "--context-parallel-size 4 --cp-ring-heads 2 --cp-comm-type a2a"),
    Rule("--cp-ring-schedule gathers !--cp-ring-schedule=auto|--cp-ring-schedule=gather",
         "--cp-comm-type all_gather is --cp-ring-schedule gather, not {own.schedule}", "drop one",
         "all keys arrive at one hop",
         "--context-parallel-size 4 --cp-comm-type all_gather --cp-ring-schedule ring"),
    Rule("nests !--hierarchical-context-parallel-sizes",
         "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes U R",
         "heads are exchanged among U ranks, in a ring of R members",
         example="--context-parallel-size 4 --cp-comm-type a2a+p2p"),
    Rule(lambda job: job.nests and (len(job.hierarchical_context_parallel_sizes) != 2
         or job.product != job.cp),
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
    Rule(lambda job: job.cp > 1 and job.num_layers
         and len(job.comm_types) not in (1, job.num_layers)
         and len(job.comm_types),
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
    Rule("key_heads_of_rank%ulysses ulysses%key_heads_of_rank",
         "{exchange} is neither a divisor nor a multiple of the {key_heads_of_rank} key/value "
         "heads of a tensor-parallel rank",
         "change either",
         "each rank that exchanges heads has key/value heads of its own, or one that it shares "
         "with its neighbors",
         "--context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 6 --hidden-size 96 "
         "--num-query-groups 3"),
    Rule(lambda job: job.hops not in (None, job.members),
         "{--cp-ring-schedule}: {hops} hops for a ring of {members} members, of {ulysses} ranks "
         "each",
         "give a hop for each member",
         example="--context-parallel-size 4 --cp-ring-schedule 0,1,2,2 "
                 "--hierarchical-context-parallel-sizes 2 2 --cp-comm-type a2a+p2p"),
)  # fmt: skip
"""Of a layer that exchanges heads among `ulysses` ranks, in a ring of `members`."""

SUBGROUP = (
    Rule("!positions_by_group",
         "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, for "
         "which Megatron's rotary embeddings need a patch",
         "call cp_ring.megatron.enable before the model is built, or give --cp-ring",
         "they take the positions of all context-parallel ranks"),
    Rule("!--calculate-per-token-loss",
         "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which "
         "needs --calculate-per-token-loss (config.calculate_per_token_loss)",
         why="ranks then hold different numbers of sequences, whose means weigh wrongly"),
    Rule(lambda job: np.any(job.moe_aux_loss_coeff or 0),
         "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which "
         "does not support {--moe-aux-loss-coeff}", "give 0",
         "the loss sums the tokens of all context-parallel ranks, which have other microbatches"),
    Rule("is_hybrid_model|--experimental-attention-variant",
         "packed_seq_params.cp_group or local_cp_size is for fewer ranks than the model's, which "
         "models with recurrent or sparse layers do not support", "leave it out",
         "these layers exchange tokens among all context-parallel ranks"),
)  # fmt: skip
"""Of microbatches on a group of their own."""


PROGRAM = (
    Rule("--cp-ring-certify=only", "--cp-ring-certify only (certify=) needs a job of flags",
         "leave it out, and call cp_ring.megatron.certify",
         "it ends Megatron's training before the first step"),
    Rule("--cp-ring-balance-microbatches",
         "--cp-ring-balance-microbatches (balance_microbatches=) needs a job of flags",
         "leave it out, or train with cp_ring.run or cp_ring.pretrain_gpt",
         "batch rows are dealt out by Megatron's own data loaders"),
    Rule("seq_length%chunks",
         "enable(seq_length={seq_length}): it is not divisible by 2 x {cp} context-parallel ranks "
         "= {chunks}",
         why="zigzag needs 2 * cp chunks of one size"),
)  # fmt: skip
"""Of `cp_ring.megatron.enable`."""

SCRIPT = (
    Rule(lambda job: job.own.enabled and job.script and implementations.other_models(job.script),
         "{script} builds {found} models, which have padding masks or cross attention; --cp-ring "
         "supports causal self attention", "run it without --cp-ring"),
    Rule("--cp-ring-document-mask",
         "--cp-ring-document-mask needs cp_ring.pretrain_gpt: {script} carries no document "
         "boundaries with its batches; --dataloader-inter-document-masking does",
         "leave it out, or give that"),
    Rule("--cp-ring reorders !--cp-ring-mask-kinds|splits_packed",
         "{--cp-ring-layout} needs cp_ring.pretrain_gpt: {script} splits its batches by "
         "Megatron's zigzag; balanced can split packed batches (--sft, "
         "--dataloader-inter-document-masking)", "leave it out"),
)  # fmt: skip
"""Of scripts that `cp_ring.run` runs."""

INSTALLED = (
    Rule(lambda job: implementations.lacking(job.letters, job.spec),
         "{pattern}: its layers need {found}, which is not installed",
         "install it, or give --spec of other layers",
         "Megatron looks for it when it builds the model"),
)  # fmt: skip
"""Of layers that Megatron makes of other packages."""

TABLE = {
    "Attention": WITHOUT_CUDA + LAYERS + ATTENTION + DOCUMENTS + LATENT,
    "Sizes": COMPLETE + SIZES + MODEL + SPLITS + MEMBERS + SUBGROUP,
    "Training": RING + TRAINING + DATA + INSTALLED + SCRIPT + PROGRAM,
}
"""All rules, by the parts of the page on troubleshooting."""
