"""The jobs in which faults are planted, and right jobs of random flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.certificate.faults import (
    DATA,
    FAULTS,
    LAYERS,
    LOSSES,
    OF_BORDERS,
    OF_LONG_ROWS,
    OF_MEANS,
    OF_ONE_LAYER,
    OF_WEIGHTS,
    PACKED,
    PRODUCTION,
)
from tests.certificate.faults import OF_LENGTH as OF_LONG_POSITIONS
from tests.parity.models import (
    COMMON,
    DELTA_NET,
    EXPERTS,
    LATENT,
    MODELS,
    QWEN,
    SPARSE,
    SPLITS,
    UNTIED,
)

OSS = f"{UNTIED} --window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable"
HYBRID = f"""
    {UNTIED} --num-layers 4 --hybrid-override-pattern M*M- --spec tests.parity.recurrent hybrid
    --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 4
"""
LINEAR = f"{QWEN.replace('--sequence-parallel', '')} --num-layers 4"
OF_HYBRID = "pretrain_mamba.py"  # the script of hybrid models in each version of Megatron-LM
HETEROGENEOUS = f"""
    {UNTIED} --num-layers 4 --use-rope-scaling --rope-scaling-factor 8.0 --use-rotary-position-embeddings --rotary-percent 1.0
    --rotary-base 10000 --heterogeneous-layers-config-path {Path(__file__).with_name("heterogeneous.json")}
"""
CONVERSATIONS = "--sft --cp-ring-pack fill --seq-length 256 --max-position-embeddings 256"
OF_SCRIPT = "--no-create-attention-mask-in-dataloader"
REAL = """
--attention-backend flash; --attention-backend fused; --attention-backend unfused; --use-mcore-models; --ckpt-format torch_dist
--log-num-zeros-in-grad --log-params-norm; --timing-log-level 2 --timing-log-option minmax; --log-throughput; --logging-level 40
--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --tensorboard-log-interval 8
--clip-grad 10.0; --weight-decay 1e-2; --lr-decay-style cosine --lr-warmup-fraction .01
--dist-ckpt-strictness log_all; --no-gradient-accumulation-fusion; --attention-softmax-in-fp32; --no-masked-softmax-fusion
--overlap-grad-reduce; --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather; --ddp-num-buckets 2
--adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8; --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion
--norm-epsilon 1e-6; --manual-gc --manual-gc-interval 100; --no-mmap-bin-files; --empty-unused-memory-level 2
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native; --no-check-for-nan-in-loss-and-grad; --add-qkv-bias
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--rerun-mode disabled; --rerun-mode validate_results; --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5
--exit-interval 50 --exit-duration-in-mins 230; --check-weight-hash-across-dp-replicas-interval 10
--eod-mask-loss; --num-dataset-builder-threads 2; --no-load-optim --no-load-rng
--kv-channels 32; --use-rope-scaling; --enable-experimental
--no-persist-layer-norm --no-bias-dropout-fusion; --accumulate-allreduce-grads-in-fp32
--use-distributed-optimizer --num-distributed-optimizer-instances 2
"""
REAL_OF_EXPERTS = """
--moe-router-dtype fp32; --moe-router-score-function sigmoid; --moe-router-topk-scaling-factor 2.5; --moe-router-pre-softmax
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3; --moe-ffn-hidden-size 64
--moe-router-num-groups 4 --moe-router-group-topk 2; --moe-per-layer-logging
--moe-router-load-balancing-type global_aux_loss
"""
REAL_ALONE = (
    "--optimizer sgd; --qk-l2-norm; --use-tp-pp-dp-mapping; --expert-tensor-parallel-size 1"
)
"""Flags as they stand in the examples and functional tests of Megatron-LM: right in any model here,
in models of experts, and in some models.
"""


@dataclass(frozen=True)
class Job:
    """A job on `ranks` ranks, through cp_ring's own entry or, with `by_script`, through
    Megatron-LM's script.

    script: its name, if it is not `pretrain_gpt.py`.
    without: flags of all jobs that this one does not have.
    step: a forward step of tests.megatron.certificate_steps in place of the job's own.
    skew: seconds within which ranks fail alike.
    """

    name: str
    ranks: int
    flags: str
    faults: tuple[str, ...] = ()
    by_script: bool = False
    script: str = ""
    without: tuple[str, ...] = ()
    step: str = ""
    skew: float = 5.0

    def argv(self):
        common = [word for word in COMMON if word not in self.without]
        sizes = "--num-layers 2 --seq-length 64 --cp-ring --context-parallel-size"
        return [
            *common,
            *shlex.split(f"{sizes} {self.ranks} {self.flags}"),
            *(shlex.split(OF_SCRIPT) if self.by_script else []),
        ]


OF_DOCUMENTS = ("documents merged", "boundary shifted by one", "padding attended")
OF_PREDICTION = ("roll across documents",)
OF_LENGTH = ("window beyond 256 tokens",)
OF_BATCH = ("second batch row like the first",)
OF_POSITIONS = ("position ids of each rank from 0",)
OF_FOUR = ("stale slot at four ranks",)
OF_EXPERTS = ("aux loss weighed twice",)
OF_STATES, OF_ORDER = tuple(LAYERS)[:1], tuple(LAYERS)[2:]
OF_OTHER_LAYERS = (
    "rotary positions of one rank shifted",
    "label at a chunk's border",
    "loss mask not split",
)
OF_LATENTS, OF_LATENTS_ON_TP = (
    ("weight gradient twice", "rotated part not returned"),
    ("latent not summed over tp",),
)
OF_BF16 = ("gradients of keys summed in bf16",)
# not in scripts
OF_DECLARED = (
    "siblings seen",
    "spans cut at borders",
    "global tokens hidden",
    "positions not continued",
)

_LATENTS = f"{LATENT} --cp-ring-wire latent --calculate-per-token-loss"
_ON_TP = f"{_LATENTS} --context-parallel-size 2 --tensor-model-parallel-size 2"
_LONG = (
    f"{UNTIED} --num-layers 1 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 "
    "--bf16"
)
_ROWS = (
    f"{UNTIED} --num-layers 1 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 "
    "--mtp-num-layers 1"
)
_ROWS += " --calculate-per-token-loss"
_PRODUCTION = (
    f"{UNTIED} --context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --cp-ring-document-mask --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --cp-ring-compare-every 0"
)
"""Its certificate alone compares the batches of ranks."""
OF_ROWS = (*OF_WEIGHTS, *OF_LONG_ROWS, *OF_LONG_POSITIONS)
_LAYERS = (
    f"{UNTIED} --num-layers 5 --window-size 5,0 --window-attn-skip-freq [1,0,0,1,1] --softmax-type "
    "learnable --calculate-per-token-loss --seq-length 512 --max-position-embeddings 512"
)
_OTHERS = (
    Job("long", 2, f"{_LONG} --calculate-per-token-loss", (*OF_LENGTH, *OF_BATCH, *OF_BF16)),
    Job(
        "learned",
        2,
        "--position-embedding-type learned_absolute --calculate-per-token-loss",
        OF_POSITIONS,
    ),
    Job("four", 4, f"{UNTIED} --calculate-per-token-loss --cp-ring-schedule ring", OF_FOUR),
    Job(
        "documents",
        2,
        f"{UNTIED} --cp-ring-document-mask --mtp-num-layers 1",
        (*OF_DOCUMENTS, *OF_PREDICTION, *OF_BORDERS),
    ),
    Job(
        "declared",
        2,
        f"{UNTIED} --cp-ring-mask-kinds shared-prefix,images,global,causal",
        OF_DECLARED,
    ),
    Job("rows", 2, _ROWS, OF_ROWS),
    Job("layers", 2, _LAYERS, tuple(OF_ONE_LAYER)),
    Job(
        "experts",
        2,
        f"{EXPERTS} --calculate-per-token-loss --expert-model-parallel-size 2",
        OF_EXPERTS,
    ),
    Job("hybrid", 2, f"{HYBRID} --calculate-per-token-loss", (*OF_STATES, *OF_OTHER_LAYERS)),
    Job("hybrid-documents", 2, f"{HYBRID} --cp-ring-document-mask", OF_ORDER),
    Job(
        "hybrid-branches",
        2,
        f"{HYBRID} --cp-ring-mask-kinds tree,causal --cp-ring-recurrent states",
        ("states begin anew on each rank", "states run across documents"),
    ),
    Job("linear-attention", 2, f"{LINEAR} --calculate-per-token-loss", OF_STATES),
    Job("linear-attention-documents", 2, f"{LINEAR} --cp-ring-document-mask", OF_ORDER),
    Job("heterogeneous", 2, f"{HETEROGENEOUS} --calculate-per-token-loss", OF_OTHER_LAYERS),
    Job("production", 4, _PRODUCTION, (*PRODUCTION, *DATA)),
    Job("latents", 2, _LATENTS, OF_LATENTS),
    Job("latents-on-tp", 4, _ON_TP, OF_LATENTS_ON_TP),
)
ELSEWHERE = {fault for job in _OTHERS for fault in job.faults} - {*OF_OTHER_LAYERS, *OF_BF16}
OF_OSS = tuple(name for name in FAULTS if name not in ELSEWHERE)
_OWN = (Job("oss", 2, f"{OSS} --calculate-per-token-loss", OF_OSS), *_OTHERS)


def _by_script(name, script=""):
    """The job of this name through the script."""
    (job,) = (job for job in _OWN if job.name == name)
    return replace(job, name=f"{name}-script", by_script=True, script=script)


FAULTY = (
    *_OWN,
    *map(_by_script, ("oss", "long", "learned", "four", "rows", "layers", "heterogeneous",
                      "latents", "latents-on-tp")),
    _by_script("hybrid", OF_HYBRID),
    Job("experts-script", 2, f"{EXPERTS} --calculate-per-token-loss", OF_EXPERTS, True),
    Job("mean-script", 2, UNTIED, (*LOSSES, *OF_MEANS), True),
    Job("sft-script", 2, f"{UNTIED} --calculate-per-token-loss {CONVERSATIONS}",
        (*OF_DOCUMENTS, *PACKED, *OF_BORDERS), True),
    Job("prediction-script", 2, f"{UNTIED} --mtp-num-layers 1 --calculate-per-token-loss",
        OF_PREDICTION, True),
)  # fmt: skip
assert set(FAULTS) == {fault for job in FAULTY for fault in job.faults if not job.by_script}

_TALKS = "--sft --seq-length 256 --max-position-embeddings 256 --cp-ring-cut-long"
_DOCUMENTED = {
    "inter-document": f"{UNTIED} --dataloader-inter-document-masking --eod-mask-loss --cp-ring-timing 2 "
        "--cp-ring-layout balanced --cp-ring-balance-microbatches --dataloader-type cyclic "
        "--cp-ring-heads 2",
    "packed first-fit": f"{UNTIED} --mtp-num-layers 1 {_TALKS} --sft-tokenizer-prompt-format "
        "nemotron-nano-v2 --cp-ring-slot-shards 1 --cp-ring-loss-chunk 24 --micro-batch-size 2",
    "mask or none": f"{UNTIED} --cp-ring-mask-kinds tree --cp-ring-layout balanced --cp-ring-debug "
        "--cp-ring-compare-every 1 --cp-ring-hop-timeout 60",
    "batch sizes": f"{UNTIED} --decrease-batch-size-if-needed --rampup-batch-size 2 2 8 "
        "--exit-signal-handler",
    "gradients in bfloat16": f"{UNTIED} --bf16 --log-max-attention-logit --cp-ring-wire-dtype bfloat16 "
        "--cp-ring-recompute replay --recompute-granularity selective",
    "float16": f"{UNTIED} --fp16 --cp-ring-wire int8 --async-save --profile --use-pytorch-profiler",
    "states of delta nets": f"{DELTA_NET} --num-layers 4 --cp-ring-recurrent G --cp-ring-document-mask",
    "sparse": f"{SPARSE.replace('--sequence-parallel', '')} --dsa-indexer-topk-freq 2",
    "masks of the data set": f"{UNTIED} --cp-ring-document-mask --reset-attention-mask "
        "--reset-position-ids",
    "heads": f"{UNTIED} --use-torch-fsdp2 --cp-comm-type a2a",
    "averages": f"{UNTIED} --use-distributed-optimizer --ddp-average-in-collective",
}  # fmt: skip
_TWO_LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"


def _of_parity():
    """The models of the parity matrix, which train there without a certificate, each in one split."""
    splits = {split.name: split for split in SPLITS}
    for model in MODELS:
        flags = f"{model.flags} {model.ring}"
        # scripts, and layers of Megatron in development
        if any(word in flags for word in (".py", "kda", "gated_delta_product")):
            continue
        split = splits[model.splits[0] if model.splits else "cp2"]
        sizes = (
            f"--context-parallel-size {split.cp} --tensor-model-parallel-size {split.tp} "
            f"--pipeline-model-parallel-size {split.pp} --num-layers {model.layers}"
        )
        talks = f"--sft --seq-length {model.sequence}" if "sft" in model.data else ""
        experts = f"--expert-model-parallel-size {model.experts}"
        ranks = split.cp * split.tp * split.pp * split.dp
        yield Job(f"parity {model.name}", ranks, f"{sizes} {talks} {experts} {flags}")


DOCUMENTED = (
    *(Job(name, 2, flags) for name, flags in _DOCUMENTED.items()),
    Job("two levels", 4, f"{UNTIED} --context-parallel-size 4 {_TWO_LEVELS}"),
    Job("stock average", 2, f"{UNTIED} --cp-ring-stock-loss-average", by_script=True),
    *_of_parity(),
)
"""Right jobs with the flags of the documentation that no other one draws."""
UNDRAWN = {
    "needs TransformerEngine or kernels that are not on a CPU": (
        "--cp-ring-beneath --cpu-offloading-num-layers --defer-embedding-wgrad-compute "
        "--delay-wgrad-compute --fine-grained-activation-offloading --gpu-sniff-test-interval "
        "--mla-down-proj-fusion --offload-modules --overlap-moe-expert-parallel-comm "
        "--transformer-impl"
    ),
    "rejected": (
        "--batch-invariant-mode --cuda-graph-impl --cuda-graph-modules --hybrid-context-parallel "
        "--yaml-cfg"
    ),
    "read by scripts alone": "--fim-data",
    "of checkpoints, the end of a job or its certificate": (
        "--async-strategy --ckpt-step --cp-ring-certify --distributed-backend --exit-signal "
        "--finetune --load --no-cp-ring-certify --save --use-checkpoint-args"
    ),
    "of steps after the first": "--full-validation --iterations-to-skip",
    "of files": "--data-cache-path --data-path --tokenizer-model",
}
"""Flags of the documentation that no right job draws, by the reason."""


def _of_other_layers(number, hybrid, ranks, by_script, more):
    """A right job with layers of several kinds."""
    model = HYBRID.replace("M*M-", "M*-M*M*-"[: 4 + number % 4]) if hybrid else HETEROGENEOUS
    words = [
        f"--num-layers {4 + number % 4}" if hybrid else "",
        f"--micro-batch-size {1 + number % 2}",
        more,
    ]
    return Job(
        f"right{number}",
        ranks,
        " ".join([model, *words]),
        (),
        by_script,
        OF_HYBRID if hybrid and by_script else "",
    )


def flags_of(scripts):
    return [each.strip() for each in scripts.replace("\n", ";").split(";") if each.strip()]


def real_job(number, of, by_script):
    """One of `of` right jobs that together have every flag of real scripts."""
    flags = flags_of(f"{REAL}; {REAL_OF_EXPERTS}; {REAL_ALONE}")[number::of]
    words = [EXPERTS, "--calculate-per-token-loss", *flags]
    return Job(f"real{number}", 2, " ".join(words), by_script=by_script)


def right_job(number, with_script):
    """The right job of this number, the same in every run; every second one through the script,
    where there is one.
    """
    rng = np.random.default_rng([4, number])
    by_script = with_script and number % 2 == 1

    def pick(*choices):
        return str(rng.choice(choices))

    other = rng.random()
    if other < 0.16:
        ranks = int(rng.choice([2, 4]))
        more = (
            f"{pick('', '--calculate-per-token-loss')} {pick('', '--bf16')} --seq-length "
            f"{64 * rng.integers(1, 5)}"
        )
        more += f" --max-position-embeddings 256 --cp-ring-route {pick('direct', 'ring')}"
        if not by_script and rng.random() < 0.4:
            more += f" --cp-ring-document-mask --cp-ring-layout {pick('zigzag', 'balanced')}"
        return _of_other_layers(number, other < 0.08, ranks, by_script, more)
    ranks, sizes = 2, "--context-parallel-size 2"
    if rng.random() < 0.25:
        ranks, sizes = 4, pick(
            "--context-parallel-size 4", "--context-parallel-size 2",
            "--context-parallel-size 2 --tensor-model-parallel-size 2",
            "--context-parallel-size 2 --pipeline-model-parallel-size 2",
        )  # fmt: skip
    heads = pick(
        "",
        "--group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 4",
    )
    latent = rng.random() < 0.15
    model = (
        LATENT
        if latent
        else f"{heads} "
        f"{pick('--position-embedding-type rope', '--position-embedding-type learned_absolute')}"
    )
    words = [
        sizes, model,
        pick("", "--untie-embeddings-and-output-weights"),
        pick("", "", f"--window-size {rng.integers(1, 70)},0",
             f"--window-size {rng.integers(1, 70)},0 --window-attn-skip-freq 2"),
        pick("", "", "--softmax-type learnable", "--softmax-type off-by-one"),
        pick("", "--bf16"), pick("", "", "--qk-layernorm") if not latent else "",
        f"--num-layers {2 if 'pipeline' in sizes else rng.integers(1, 4)} --seq-length "
        f"{64 * rng.integers(1, 5)}",
        "--max-position-embeddings 256",
        f"--micro-batch-size {rng.integers(1, 3)}", pick("", "--calculate-per-token-loss"),
        f"--cp-ring-route {pick('direct', 'direct', 'ring')} --cp-ring-schedule "
        f"{pick('auto', 'ring', 'gather')}",
        f"--cp-ring-num-slots {rng.integers(2, 4)} --cp-ring-wire-dtype {pick('input', 'float32')}",
        pick("", "", "--cp-ring-kernel reference"), pick("", "", "--use-distributed-optimizer"),
    ]  # fmt: skip
    if not by_script and rng.random() < 0.4:
        words.append(f"--cp-ring-document-mask --cp-ring-layout {pick('zigzag', 'balanced')}")
    # Megatron has no such model
    if not latent and "pipeline" not in sizes and rng.random() < 0.15 and "learned" not in model:
        words.append("--mtp-num-layers 1")
    # Megatron wants sequence parallel norms then
    elif not latent and "tensor" not in sizes and rng.random() < 0.25:
        balance = pick("aux_loss", "seq_aux_loss", "none", "sinkhorn", "quantile_balancing")
        words.append(f"--num-experts 8 --moe-router-topk {rng.integers(2, 4)}")
        words.append("--moe-aux-loss-coeff 1e-2" if "aux" in balance else "")
        words.append(
            f"--moe-router-load-balancing-type {balance} {pick('', '--moe-z-loss-coeff 1e-3')}"
        )
        if balance not in ("sinkhorn", "quantile_balancing") and rng.random() < 0.4:
            words.append(
                f"--moe-expert-capacity-factor {pick('0.5', '1.0', '2.0')} "
                "--moe-token-dispatcher-type alltoall"
            )
        words.append(pick("", "", "--moe-layer-freq 2"))
        words.append(pick("", "", "--moe-shared-expert-intermediate-size 64"))
        words.append(
            "--expert-model-parallel-size 2"
            if ranks == 4 and "tensor" not in sizes and rng.random() < 0.5
            else ""
        )
    without = tuple(word for word in ("--disable-bias-linear", "--swiglu") if rng.random() < 0.5)
    if any("shared-expert" in word for word in words):  # which have no biases
        without = tuple({*without} - {"--disable-bias-linear"})
    words += [*rng.choice(flags_of(REAL), 6, replace=False)]
    if any("--num-experts" in word for word in words):
        words += [*rng.choice(flags_of(REAL_OF_EXPERTS), 2, replace=False)]
    if (by_script or any("document-mask" in word for word in words)) and rng.random() < 0.3:
        words.append(CONVERSATIONS)
    return Job(
        f"right{number}",
        ranks,
        " ".join(word for word in words if word),
        by_script=by_script,
        without=without,
    )
