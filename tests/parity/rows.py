"""Models and splits that are tested for parity: one table each. A new model or a new split is one more entry."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

COMMON = shlex.split("""
    --cp-ring-cpu --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 64
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --mock-data --split 90,5,5
    --dataloader-type single --num-workers 0 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --log-interval 100 --seed 7
    --init-method-std 0.1 --train-iters 3 --micro-batch-size 1 --global-batch-size 4 --eval-interval 2 --eval-iters 1
""")
ROPE = "--position-embedding-type rope"
GROUPED = f"{ROPE} --group-query-attention --num-query-groups 2"
UNTIED = f"{GROUPED} --untie-embeddings-and-output-weights"
LATENT = f"""
    {ROPE} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24
    --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 --mscale 1 --mscale-all-dim 1
"""
DOCUMENTS = f"{UNTIED} --cp-ring-document-mask"
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
        tolerance: largest relative error of a loss or a gradient norm.
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
    Row("learnable_sinks", f"{UNTIED} --softmax-type learnable", "sink gradient dropped"),
    Row("off_by_one", f"{UNTIED} --softmax-type off-by-one", "sink dropped"),
    Row("sinks_and_window", f"{UNTIED} --softmax-type learnable --window-size 11,0 --window-attn-skip-freq 2", "sink dropped"),
    Row("mla", LATENT, "scale of the head size", baseline=REFERENCE),
    Row("moe", f"{UNTIED} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2", "positions of another split", experts=2),
    Row("tied_embeddings", GROUPED, "positions of another split"),
    Row("learned_positions", "--position-embedding-type learned_absolute", "mask widened"),
    Row("qk_layernorm", f"{UNTIED} --qk-layernorm", "scale of the head size"),
    Row("one_key_head", f"{ROPE} --group-query-attention --num-query-groups 1", "mask widened"),
    Row("recompute_full", f"{UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "mask widened"),
    Row("recompute_selective", f"{UNTIED} --softmax-type learnable --recompute-granularity selective", "sink gradient dropped"),
    Row("distributed_optimizer", f"{UNTIED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "mask widened"),
    Row(
        "virtual_pipeline",
        f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2 --num-layers-per-virtual-pipeline-stage 1",
        "window widened",
        columns=("pp2cp2",),
        layers=4,
    ),
    Row("packed_thd", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE, data="thd"),
    Row("document_mask", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE, data="documents"),
    Row("document_mask_window", f"{DOCUMENTS} --window-size 5,0 --window-attn-skip-freq 2", "documents merged",
        baseline=REFERENCE, data="documents"),
    Row("document_mask_balanced", DOCUMENTS, "positions of zigzag", "--cp-ring-layout balanced", REFERENCE, "documents"),
    Row("document_mask_two_rows", f"{DOCUMENTS} --micro-batch-size 2", "documents merged", "--cp-ring-layout balanced", REFERENCE,
        "documents"),
    Row("document_mask_mla", f"{LATENT} --cp-ring-document-mask", "documents merged", baseline=REFERENCE, data="documents"),
    Row("document_mask_moe", f"{DOCUMENTS} --num-experts 4 --moe-router-topk 2", "documents merged", "--cp-ring-layout balanced",
        REFERENCE, "documents"),
    Row("mtp", f"{UNTIED} --mtp-num-layers 2", "roll across documents"),
    Row("mtp_document_mask", f"{DOCUMENTS} --mtp-num-layers 1", "roll across documents", baseline=REFERENCE, data="documents"),
    Row("mtp_packed_thd", f"{DOCUMENTS} --mtp-num-layers 1", "roll across documents", baseline=REFERENCE, data="thd"),
    Row("bf16", f"{UNTIED} --bf16", "scale of the head size", tolerance=5e-3),
)  # fmt: skip
