"""Models and splits that are tested for parity: one table each. A new model or a new split is one more entry."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

COMMON = shlex.split("""
    --cp-ring-cpu --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 64
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --mock-data --split 90,5,5
    --dataloader-type single --num-workers 0 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --log-interval 100 --seed 7
    --init-method-std 0.1 --train-iters 3 --micro-batch-size 1 --global-batch-size 4 --eval-interval 2 --eval-iters 1
    --distributed-timeout-minutes 3
""")
ROPE = "--position-embedding-type rope"
HEADS = "--group-query-attention --num-query-groups 2"
GROUPED = f"{ROPE} {HEADS}"
UNTIED = f"{GROUPED} --untie-embeddings-and-output-weights"
EXPERTS = f"{UNTIED} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
LATENT = f"""
    {ROPE} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24
    --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 --mscale 1 --mscale-all-dim 1
"""
LEARNED = "--position-embedding-type learned_absolute"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
MULTIMODAL = "--position-embedding-type mrope --mrope-section 2 3 3"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DOCUMENTS = f"{UNTIED} --cp-ring-document-mask"
EXPERTS_ON_TP = {"tp2cp2": "--num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel"}
SEQUENCE_PARALLEL = "--sequence-parallel --spec tests.parity.specs sequence_parallel"  # a norm that supports it
BALANCED, CONTIGUOUS = "--cp-ring-layout balanced", "--cp-ring-layout contiguous"
STOCK = ""  # stock Megatron's own attention
REFERENCE = "--cp-ring --cp-ring-kernel reference"  # where stock attention has no such model on the CPU


@dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
        flags: Megatron's, without the sizes of parallel groups.
        fault: the planted fault (see `faults.py`) that must turn this row red.
        ring: flags of the job under test beside `--cp-ring`, not of its baseline.
        baseline: flags of attention in the baseline, which has context parallel size 1.
        data: how its microbatches come (see `deliveries.py`).
        columns: names of the columns it runs in; all of them if empty.
        layers: transformer layers.
        experts: expert parallel size.
        sequence: tokens of a sequence.
        tolerance: largest relative error of a loss or a gradient norm; of a model in bfloat16 one rounding step of that format.
        drawn_by_tp: whether each tensor-parallel rank draws some weights for itself, so that the baseline needs as many.
        refused: of each column that cannot be, a part of the message.
    """

    name: str
    flags: str
    fault: str
    ring: str = ""
    baseline: str = STOCK
    data: str = ""
    columns: tuple[str, ...] = ()
    layers: int = 2
    experts: int = 1
    sequence: int = 64
    tolerance: float = 1e-5
    drawn_by_tp: bool = False
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Column:
    """A split of the model over ranks."""

    name: str
    cp: int
    tp: int = 1
    pp: int = 1
    dp: int = 1


COLUMNS = (
    Column("cp2", cp=2),
    Column("cp4", cp=4),
    Column("tp2cp2", cp=2, tp=2),
    Column("pp2cp2", cp=2, pp=2),
    Column("dp2cp2", cp=2, dp=2),
)

ROWS = (
    Row("causal", UNTIED, "mask widened"),
    Row("causal_ring_route", UNTIED, "mask widened", ring="--cp-ring-route ring --cp-ring-num-slots 3"),
    Row("window_on_alternate_layers", f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2", "window widened"),
    Row("window_by_list", f"{UNTIED} --window-size 20,0 --window-attn-skip-freq [0,1]", "window on every layer"),
    Row("learnable_sinks", f"{UNTIED} --softmax-type learnable", "sink dropped"),
    Row("off_by_one", f"{UNTIED} --softmax-type off-by-one", "sink dropped"),
    Row("sinks_and_window", f"{UNTIED} --softmax-type learnable --window-size 11,0 --window-attn-skip-freq 2", "sink dropped"),
    Row("mla", LATENT, "scale of the head size", baseline=REFERENCE, drawn_by_tp=True),
    Row("moe", EXPERTS, "positions of another split", experts=2, refused=EXPERTS_ON_TP),
    Row("tied_embeddings", GROUPED, "positions of another split"),
    Row("learned_positions", LEARNED, "mask widened"),
    Row("qk_layernorm", f"{UNTIED} --qk-layernorm", "scale of the head size"),
    Row("one_key_head", f"{ROPE} --group-query-attention --num-query-groups 1", "mask widened"),
    Row("recompute_full", f"{UNTIED} {RECOMPUTE}", "mask widened", ring="--cp-ring-recompute replay"),
    Row("recompute_full_with_keep", f"{UNTIED} {RECOMPUTE}", "mask widened", ring="--cp-ring-recompute keep"),
    Row("recompute_selective", f"{UNTIED} --softmax-type learnable --recompute-granularity selective", "sink gradient dropped"),
    Row("distributed_optimizer", f"{UNTIED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "mask widened"),
    Row(
        "virtual_pipeline",
        f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2 --num-layers-per-virtual-pipeline-stage 1",
        "window widened",
        columns=("pp2cp2",),
        layers=4,
    ),
    Row("virtual_pipeline_moe", f"{EXPERTS} --num-layers-per-virtual-pipeline-stage 1", "mask widened", columns=("pp2cp2",), layers=4,
        experts=2),
    Row("virtual_pipeline_mtp", f"{UNTIED} --mtp-num-layers 1 --num-layers-per-virtual-pipeline-stage 1", "roll across documents",
        columns=("pp2cp2",), layers=4),
    Row("packed_thd", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE, data="thd"),
    Row("document_mask", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE, data="documents"),
    Row("document_mask_window", f"{DOCUMENTS} --window-size 5,0 --window-attn-skip-freq 2", "documents merged",
        baseline=REFERENCE, data="documents"),
    Row("document_mask_balanced", DOCUMENTS, "positions of zigzag", BALANCED, REFERENCE, "documents"),
    Row("document_mask_two_rows", f"{DOCUMENTS} --micro-batch-size 2", "documents merged", BALANCED, REFERENCE,
        "documents"),
    Row("document_mask_mla", f"{LATENT} --cp-ring-document-mask", "documents merged", baseline=REFERENCE, data="documents",
        drawn_by_tp=True),
    Row("document_mask_moe", f"{DOCUMENTS} --num-experts 4 --moe-router-topk 2", "documents merged", BALANCED,
        REFERENCE, "documents", experts=2, refused=EXPERTS_ON_TP),
    Row("mtp", f"{UNTIED} --mtp-num-layers 2", "roll across documents"),
    Row("mtp_document_mask", f"{DOCUMENTS} --mtp-num-layers 1", "roll across documents", baseline=REFERENCE, data="documents"),
    Row("mtp_packed_thd", f"{DOCUMENTS} --mtp-num-layers 1", "roll across documents", baseline=REFERENCE, data="thd"),
    Row("mtp_uneven_loss_mask", f"{UNTIED} --mtp-num-layers 2", "tokens counted by rank", data="uneven"),
    Row("uneven_loss_mask", UNTIED, "loss averaged by rank", data="uneven"),
    Row("attention_scale", f"{UNTIED} --use-mup --mup-base-hidden-size 32", "scale of the head size"),
    Row("yarn", f"{HEADS} {YARN}", "positions of another split"),
    Row("mrope", f"{HEADS} {MULTIMODAL}", "positions of another split"),
    Row("causal_contiguous", UNTIED, "mask widened", ring=CONTIGUOUS, columns=("cp4",)),
    Row("mrope_contiguous", f"{HEADS} {MULTIMODAL}", "mask widened", ring=CONTIGUOUS, columns=("cp4",)),
    Row("mla_contiguous", LATENT, "scale of the head size", CONTIGUOUS, REFERENCE, columns=("cp4",), drawn_by_tp=True),
    Row("document_mask_balanced_learned_positions", f"{LEARNED} --cp-ring-document-mask", "documents merged", BALANCED, REFERENCE,
        "documents", columns=("cp4",)),
    Row("document_mask_balanced_yarn", f"{HEADS} {YARN} --cp-ring-document-mask", "positions of zigzag", BALANCED, REFERENCE,
        "documents", columns=("cp4",)),
    Row("hybrid_model", f"{UNTIED} --hybrid-layer-pattern *-*- --spec tests.parity.specs hybrid", "mask widened", layers=4),
    Row("sequence_parallel", UNTIED, "mask widened", ring=SEQUENCE_PARALLEL, columns=("tp2cp2",)),
    Row("moe_sequence_parallel", EXPERTS, "mask widened", ring=SEQUENCE_PARALLEL, columns=("tp2cp2",), experts=2),
    Row("bf16", f"{UNTIED} --bf16", "scale of the head size", tolerance=2**-8),
)  # fmt: skip
