"""Models and splits that are tested for parity: one table each. A new model or a new split is one
more entry.
"""

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

SCRIPT = str(Path(__file__).parents[1] / "megatron" / "packing_script.py")
COMMON = shlex.split("""
    --cp-ring-cpu --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 64
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --mock-data --split 90,10,0
    --dataloader-type single --num-workers 0 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --log-interval 100 --seed 7
    --init-method-std 0.1 --train-iters 3 --micro-batch-size 1 --global-batch-size 4 --eval-interval 2 --eval-iters 1
    --distributed-timeout-minutes 30
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
LATENT_WIRE = "--cp-ring-wire latent"
PLAIN = ("cp2", "cp4", "tp2cp2", "pp2cp2", "dp2cp2")
LATENTS_ALONE = dict.fromkeys(("a2a", "a2a+p2p"), "does not support --cp-ring-heads")
GATHERED = {"ring": "--cp-ring-schedule gather"}
UP_PROJECTION_AGAIN = "--recompute-granularity selective --recompute-modules mla_up_proj"
DOCUMENTS = f"{UNTIED} --cp-ring-document-mask"
PREFIXES = "--cp-ring-mask-kinds shared-prefix"
# with Megatron's 1e-8, Adam can make whole steps of rounding noise: 1.1e-6, 1.3e-6 with two stages
LARGE_EPSILON = "--adam-eps 1e-5"
MAMBA = f"""
    {UNTIED} --hybrid-layer-pattern M*M- --spec tests.parity.recurrent hybrid
    --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 4 --init-method-std 0.02
"""
DELTA_NET = f"""
    {UNTIED} --hybrid-layer-pattern G*G- --spec tests.parity.recurrent hybrid
    --linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 4 --linear-num-value-heads 8
    --init-method-std 0.02
"""
PRODUCT = MAMBA.replace(
    "parity.recurrent hybrid",
    f"parity.recurrent gated_delta_product_stack_spec --mamba-num-heads 8 {LARGE_EPSILON}",
)
BOTH = f"""
    {MAMBA.replace("M*M-", "M*G-")} --linear-key-head-dim 8 --linear-value-head-dim 16
    --linear-num-key-heads 4 --linear-num-value-heads 8
"""
KIMI = f"""
    {UNTIED} --experimental-attention-variant kda --linear-attention-freq 2 --adam-eps 1e-5
    --spec tests.parity.recurrent linear_attention --sequence-parallel --apply-layernorm-1p
    --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 8 --linear-num-value-heads 8
    --init-method-std 0.02
"""
QWEN = f"""
    {EXPERTS} --adam-eps 1e-5 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --attention-output-gate
    --moe-shared-expert-intermediate-size 64 --moe-layer-freq 2 --rotary-percent 0.5 --sequence-parallel
    --apply-layernorm-1p
    --spec tests.parity.recurrent linear_attention
    --linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 4 --linear-num-value-heads 8
    --init-method-std 0.02
"""
SPARSE = f"""
    {LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16
    --dsa-indexer-topk 24 --dsa-indexer-loss-coeff 1e-2 --no-dsa-indexer-rotate-activation
    --sequence-parallel --spec tests.parity.recurrent linear_attention
"""
SPARSE_HYBRID = f"""
    {SPARSE.replace("linear_attention", "sparse_hybrid").replace("--sequence-parallel", "")}
    --hybrid-layer-pattern D-D-
"""
WITHOUT_TP = ("cp2", "cp4", "pp2cp2", "dp2cp2")
# a norm that supports it
SEQUENCE_PARALLEL = "--sequence-parallel --spec tests.parity.specs sequence_parallel"
BALANCED, CONTIGUOUS = "--cp-ring-layout balanced", "--cp-ring-layout contiguous"
MEGATRON_FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
WITHOUT_PP = ("cp2", "cp4", "tp2cp2", "dp2cp2")
STOCK = ""  # stock Megatron's own attention
# where stock attention has no such model on the CPU
HEADS_WAY, STATES = "--cp-ring-recurrent heads", "--cp-ring-recurrent states"
REFERENCE = "--cp-ring --cp-ring-kernel reference"


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        flags: Megatron flags, without the sizes of parallel groups. In these and the next two, a
        word that ends with .py is a script for cp_ring.run.
        fault: the planted fault (see `faults.py`) that must turn this model red.
        ring: flags of the job under test beside `--cp-ring`, not of its baseline.
        baseline: flags of attention in the baseline, which has context parallel size 1.
        data: the kind of its microbatches (see `deliveries.py`), or the kind of its files (see
        `matrix.common`).
        splits: names of the splits in which it runs; empty for all.
        layers: transformer layers.
        experts: expert parallel size.
        sequence: tokens of a sequence.
        tolerance: largest relative error of a loss or a gradient norm; of a model in bfloat16 one
        rounding step of that format.
        against: the split of the baseline, which then has as many ranks; "" for one rank.
        resumes: the split whose checkpoint of step 2 it resumes from; "" if it trains all steps.
        drawn_by_tp: whether each tensor-parallel rank draws some weights for itself.
        rejected: for each split that is rejected, a part of the message.
        needs: a module of `megatron.core.ssm` that not every version has; "" for none.
    """

    name: str
    flags: str
    fault: str
    ring: str = ""
    baseline: str = STOCK
    data: str = ""
    splits: tuple = ()
    layers: int = 2
    experts: int = 1
    sequence: int = 64
    tolerance: float = 1e-5
    against: str = ""
    resumes: str = ""
    drawn_by_tp: bool = False
    rejected: Mapping = field(default_factory=dict, hash=False)
    needs: str = ""

    @property
    def available(self):
        """Whether the installed Megatron has its layers."""
        with contextlib.suppress(ModuleNotFoundError):  # the folder of the module may be missing
            return find_spec(f"megatron.core.ssm.{self.needs}".rstrip(".")) is not None
        return False

    @property
    def differs_by_tp(self):
        """Whether stock Megatron's gradients depend on the tensor-parallel size: those of latents,
        and those of a gated delta net's norm without sequence parallelism.
        """
        delta = "--hybrid-layer-pattern G" in self.flags and "--sequence-parallel" not in self.flags
        return delta or "--multi-latent-attention" in self.flags


@dataclass(frozen=True)
class Split:
    """A split of the model over ranks, with `flags` of its job; models that run in the split `like`
    run in it too.
    """

    name: str
    cp: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    flags: str = ""
    like: str = ""


SPLITS = (
    Split("cp2", cp=2),
    Split("cp4", cp=4),
    Split("tp2cp2", cp=2, tp=2),
    Split("pp2cp2", cp=2, pp=2),
    Split("dp2cp2", cp=2, dp=2),
    Split("ring", cp=4, flags="--cp-ring-schedule ring", like="cp4"),
    Split("a2a", cp=4, flags="--cp-comm-type a2a", like="cp4"),
    Split(
        "a2a+p2p",
        cp=4,
        flags="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        like="cp4",
    ),
    Split("gather", cp=4, flags="--cp-comm-type all_gather", like="cp4"),
)


four_layers = partial(Model, layers=4, tolerance=1e-6)
latents = partial(Model, tolerance=1e-6, drawn_by_tp=True, rejected=LATENTS_ALONE)
LONG = "--max-position-embeddings 256 --calculate-per-token-loss"
SFT = f"{UNTIED} {LONG} --cp-ring-cut-long --make-vocab-size-divisible-by 64"  # 512 at tp 1 and 2
INTER = "--dataloader-inter-document-masking --eod-mask-loss"
DENSE = f"{SCRIPT} --reset-attention-mask --reset-position-ids --eod-mask-loss"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def _of_files():
    """Models that train on files: conversations (`--sft`), and documents whose baseline is stock
    Megatron with dense masks.
    """
    sft = partial(Model, data="sft", sequence=256, splits=PLAIN)
    filled, alone = f"{SFT} --cp-ring-pack fill", f"{REFERENCE} {BALANCED}"
    shifted = "boundary shifted by one"
    yield sft("sft", filled, shifted, ring=BALANCED, baseline=alone)
    yield sft("sft_dealt", f"{filled} --micro-batch-size 2", "documents merged",
        ring=f"{BALANCED} --cp-ring-balance-microbatches", baseline=alone)  # fmt: skip
    yield sft("sft_mtp", f"{filled} --mtp-num-layers 1", "roll across documents",
        ring=BALANCED, baseline=alone)  # fmt: skip
    yield sft("sft_script", filled, shifted,
        ring=f"{SCRIPT} {BALANCED}", baseline=f"{SCRIPT} {alone}")  # fmt: skip
    yield sft("sft_resumed", f"{filled} {RESHARDABLE}", shifted, ring=BALANCED, baseline=alone,
        resumes="dp2cp2")  # fmt: skip
    files = partial(Model, baseline=DENSE, data="corpus", sequence=128)
    long = f"{UNTIED} {LONG}"
    yield files("inter_document", f"{long} --micro-batch-size 2", "documents merged",
        ring=f"{SCRIPT} {INTER}", splits=WITHOUT_PP)  # fmt: skip
    yield files("inter_document_balanced", long, shifted, ring=f"{SCRIPT} {INTER} {BALANCED}",
        splits=PLAIN)  # fmt: skip
    yield files("document_mask_entry", f"{long} {RECOMPUTE}", shifted,
        splits=PLAIN,
        ring="--cp-ring-document-mask --reset-position-ids --eod-mask-loss")  # fmt: skip


def _recurrent(name, flags, balanced=1e-6):
    """Models with recurrent layers, under each layout and with documents; `balanced` is the
    tolerance of that layout.
    """
    # With documents the baseline is cp_ring at context parallel size 1, because stock attention
    # takes none on the CPU; tests/megatron/test_recurrent.py compares the recurrent layers there
    # with stock ones on each document alone.
    masked, order, late = (
        f"{flags} --cp-ring-document-mask",
        "state in the order of another layout",
        "state begins anew too late",
    )
    across, two, three = "state across documents", ("cp2", "cp4"), ("cp2", "cp4", "tp2cp2")
    for ring, way in ((HEADS_WAY, ""), (STATES, "_states")):
        own = f"{name}{way}"
        yield four_layers(own, flags, order, ring, splits=PLAIN, drawn_by_tp=True)
        yield four_layers(f"{own}_contiguous", flags, order, f"{ring} {CONTIGUOUS}", splits=two)
        yield four_layers(f"{own}_balanced", f"{flags} --window-size 20,0", order,
            f"{ring} {BALANCED}",
            splits=two, tolerance=balanced)  # fmt: skip
        yield four_layers(f"{own}_document_mask", masked, across, ring, REFERENCE, "documents",
            splits=three,
            drawn_by_tp=True)  # fmt: skip
        yield four_layers(f"{own}_document_mask_balanced", f"{masked} --micro-batch-size 2", late,
            f"{ring} {BALANCED}", REFERENCE, "documents", splits=PLAIN,
            drawn_by_tp=True)  # fmt: skip
        yield four_layers(f"{own}_packed_thd", masked, across, ring, REFERENCE, "thd", splits=two)
        yield four_layers(f"{own}_shared_prefix", f"{flags} {PREFIXES}", across,
            f"{ring} {BALANCED}",
            REFERENCE, "shared_prefix", splits=two)  # fmt: skip


def _one_ring():
    """Models whose documents lie in one row over all ranks, balanced, against dp 2 x cp 2 with the
    same documents in rows of half the length.
    """
    make = partial(Model, ring=f"--seq-length 128 --micro-batch-size 2 {BALANCED}",
        baseline="", data="joined documents", splits=("cp4",), against="dp2cp2",
        tolerance=1e-6)  # fmt: skip
    rows, merged = "--max-position-embeddings 256 --cp-ring-document-mask", "documents merged"
    yield make("one_ring", f"{UNTIED} {rows}", "boundary shifted by one")
    yield make(
        "one_ring_windows", f"{UNTIED} {rows} --window-size 11,0 --window-attn-skip-freq 2", merged
    )
    # Megatron's aux_loss is of a microbatch, whose tokens are others here; it weighs global_aux_loss
    # by the tokens of tensor- and context-parallel ranks alone, which are twice as many here
    yield make(
        "one_ring_moe",
        f"{EXPERTS} {rows} --moe-router-load-balancing-type global_aux_loss",
        merged,
        baseline="--moe-aux-loss-coeff 2e-2",
    )
    # it weighs predictions of a microbatch by numbers of its tokens; at cp 1 with these: 7e-8
    yield make(
        "one_ring_mtp",
        f"{UNTIED} {rows} --mtp-num-layers 1",
        "roll across documents",
        tolerance=1e-4,
    )
    latent = make(name="one_ring_latent", flags=f"{LATENT} {rows}", fault="weight gradient twice")
    yield replace(
        latent, ring=f"{latent.ring} {LATENT_WIRE}", baseline=LATENT_WIRE, rejected=LATENTS_ALONE
    )
    sft = make(
        "one_ring_sft",
        f"{SFT} --cp-ring-pack fill --max-position-embeddings 512",
        "boundary shifted by one",
        sequence=256,
    )
    yield replace(sft, ring=sft.ring.replace("128", "512"), data="joined sft")


def _alike(name, flags, needs):
    """Models of a kind of layer of Megatron in development."""
    make = partial(four_layers, drawn_by_tp=True, needs=needs)
    order, across = "state in the order of another layout", "state across documents"
    every = ("cp2", "cp4", "tp2cp2", "pp2cp2")
    for ring, way in ((HEADS_WAY, ""), (STATES, "_states")):
        yield make(f"{name}{way}", flags, order, ring, splits=every)
        yield make(f"{name}{way}_document_mask_balanced",
            f"{flags} --cp-ring-document-mask --micro-batch-size 2", across,
            f"{ring} {BALANCED}", REFERENCE, "documents", splits=every)  # fmt: skip


MODELS = (
    Model("causal", UNTIED, "mask widened"),
    Model("causal_ring_route", UNTIED, "mask widened",
        ring="--cp-ring-route ring --cp-ring-num-slots 3"),
    Model("window_on_alternate_layers", f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2",
        "window widened"),
    Model("learnable_sinks", f"{UNTIED} --softmax-type learnable", "sink dropped"),
    Model("off_by_one", f"{UNTIED} --softmax-type off-by-one", "sink dropped"),
    Model("sinks_and_window",
        f"{UNTIED} --softmax-type learnable --window-size 11,0 --window-attn-skip-freq 2",
        "sink dropped"),
    Model("mla", LATENT, "scale of the head size", baseline=REFERENCE),
    latents("mla_latent_wire", LATENT, "weight gradient twice", LATENT_WIRE, REFERENCE,
        splits=PLAIN),
    latents("mla_latent_wire_with_recompute", f"{LATENT} {UP_PROJECTION_AGAIN}",
        "rotated part not returned", LATENT_WIRE, REFERENCE,
        splits=PLAIN),
    Model("mla_latent_wire_moe_mtp_sequence_parallel",
        f"{LATENT} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --mtp-num-layers "
        f"1 {SEQUENCE_PARALLEL}",
        "weight gradient twice", LATENT_WIRE, REFERENCE, splits=("tp2cp2",), tolerance=1e-6, drawn_by_tp=True),
    latents("mla_latent_wire_documents", f"{LATENT} --cp-ring-document-mask", "documents merged",
        f"{LATENT_WIRE} {BALANCED}", REFERENCE,
        "documents", splits=("cp4",)),
    # under tp Megatron wants sequence parallelism: "moe_sequence_parallel"
    Model("moe", EXPERTS, "positions of another split", experts=2, splits=WITHOUT_TP),
    Model("tied_embeddings", GROUPED, "positions of another split"),
    Model("learned_positions", LEARNED, "mask widened"),
    Model("qk_layernorm", f"{UNTIED} --qk-layernorm", "scale of the head size"),
    Model("recompute_full", f"{UNTIED} {RECOMPUTE}", "mask widened",
        ring="--cp-ring-recompute replay"),
    Model("recompute_full_with_keep", f"{UNTIED} {RECOMPUTE}", "mask widened",
        ring="--cp-ring-recompute keep"),
    Model("recompute_selective",
        f"{UNTIED} --softmax-type learnable --recompute-granularity selective",
        "sink gradient dropped"),
    Model("distributed_optimizer",
        f"{UNTIED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "mask widened"),
    Model(
        "virtual_pipeline",
        f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        "window widened",
        splits=("pp2cp2",),
        layers=4,
    ),
    Model("packed_thd", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE, data="thd"),
    Model("document_mask", DOCUMENTS, "boundary shifted by one", baseline=REFERENCE,
        data="documents"),
    Model("document_mask_balanced", DOCUMENTS, "positions of zigzag", BALANCED, REFERENCE,
        "documents"),
    Model("document_mask_mla", f"{LATENT} --cp-ring-document-mask", "documents merged", baseline=REFERENCE,
        data="documents",
        drawn_by_tp=True),
    Model("document_mask_balanced_mla", f"{LATENT} --cp-ring-document-mask", "positions of zigzag", BALANCED, REFERENCE,
        "documents",
        drawn_by_tp=True),
    Model("window_on_alternate_layers_balanced",
        f"{UNTIED} --window-size 11,0 --window-attn-skip-freq 2",
        "window widened", BALANCED),
    Model("mla_balanced", f"{LATENT} --window-size 11,0 --window-attn-skip-freq 2", "window widened", BALANCED, REFERENCE,
        splits=("cp4",), drawn_by_tp=True),
    Model("hybrid_model_balanced",
        f"{UNTIED} --hybrid-layer-pattern *-*- --spec tests.parity.specs hybrid",
        "mask widened",
        BALANCED, layers=4, splits=("cp2",)),
    Model("shared_prefix", f"{UNTIED} {PREFIXES}", "siblings seen", BALANCED, REFERENCE,
        "shared_prefix"),
    Model("shared_prefix_mla", f"{LATENT} {PREFIXES}", "positions not continued", BALANCED, REFERENCE,
        "shared_prefix",
        splits=("cp2",), drawn_by_tp=True),
    Model("shared_prefix_mtp", f"{UNTIED} {PREFIXES} --mtp-num-layers 1", "roll in one sequence", BALANCED, REFERENCE,
        "shared_prefix",
        splits=("cp2",)),
    Model("images", f"{UNTIED} --cp-ring-mask-kinds images", "spans cut at borders", baseline=REFERENCE,
        data="images"),
    Model("global_tokens", f"{UNTIED} --cp-ring-mask-kinds global", "global tokens hidden", BALANCED, REFERENCE,
        "global"),
    Model("mtp", f"{UNTIED} --mtp-num-layers 2", "roll across documents"),
    Model("loss_chunk_mtp", f"{UNTIED} --mtp-num-layers 2", "labels of another chunk",
        ring="--cp-ring-loss-chunk 12", splits=PLAIN),
    four_layers("loss_chunk_qwen3_next_mtp", f"{QWEN} --mtp-num-layers 1",
        "labels of another chunk",
        "--cp-ring-loss-chunk 12", REFERENCE, splits=("cp2", "tp2cp2"), drawn_by_tp=True),
    Model("mtp_document_mask", f"{DOCUMENTS} --mtp-num-layers 1", "roll across documents", baseline=REFERENCE,
        data="documents"),
    Model("mtp_uneven_loss_mask", f"{UNTIED} --mtp-num-layers 2", "tokens counted by rank",
        data="uneven"),
    Model("uneven_loss_mask", UNTIED, "loss averaged by rank", data="uneven"),
    # with Megatron's 1e-8, Adam makes whole steps of rounding noise: 1.5e-6 with two stages
    Model("uneven_loss_mask_mean", f"{UNTIED} --adam-eps 1e-5",
        "tokens of the loss counted by rank", data="uneven_mean", tolerance=1e-6),
    Model("mtp_uneven_loss_mask_mean", f"{UNTIED} --mtp-num-layers 2",
        "tokens of predictions counted by rank", data="uneven_mean", tolerance=1e-6),
    # under tp Megatron clips weights of multi-latent attention alone
    Model("qk_clip", f"{UNTIED} --bf16 --qk-clip --qk-clip-threshold 0.05", "scale of the head size", tolerance=2**-8,
        baseline="--cp-ring --cp-ring-kernel cpu", splits=WITHOUT_TP),
    Model("fsdp2", UNTIED, "mask widened", ring="--use-torch-fsdp2", splits=WITHOUT_PP),
    Model("megatron_fsdp", UNTIED, "mask widened", ring=f"{MEGATRON_FSDP} optim_grads_params",
        splits=WITHOUT_PP,
        tolerance=1e-6),
    Model("megatron_fsdp_bf16", f"{UNTIED} --bf16", "mask widened",
        ring=f"{MEGATRON_FSDP} optim_grads_params",
        splits=("cp2", "dp2cp2"), tolerance=2**-8),
    Model("attention_scale", f"{UNTIED} --use-mup --mup-base-hidden-size 32",
        "scale of the head size"),
    Model("yarn", f"{HEADS} {YARN}", "positions of another split"),
    Model("mrope", f"{HEADS} {MULTIMODAL}", "positions of another split"),
    Model("causal_contiguous", UNTIED, "mask widened", ring=CONTIGUOUS, splits=("cp4",)),
    Model("mrope_images", f"{HEADS} {MULTIMODAL}", "one position in all sections",
        data="sections"),
    Model("mrope_images_virtual_pipeline",
        f"{HEADS} {MULTIMODAL} --num-layers-per-virtual-pipeline-stage 1",
        "one position in all sections", data="sections", splits=("pp2cp2",), layers=4),
    Model("mrope_images_documents_virtual_pipeline",
        f"{HEADS} {MULTIMODAL} --cp-ring-document-mask --num-layers-per-virtual-pipeline-stage 1",
        "one position in all sections", BALANCED, REFERENCE, "sections_documents",
        splits=("pp2cp2",), layers=4),
    Model("mrope_images_documents_balanced", f"{HEADS} {MULTIMODAL} --cp-ring-document-mask",
        "one position in all sections", BALANCED, REFERENCE, "sections_documents",
        splits=PLAIN),
    Model("mrope_images_packed_thd", f"{HEADS} {MULTIMODAL} --cp-ring-document-mask",
        "one position in all sections", baseline=REFERENCE, data="sections_thd",
        splits=PLAIN),
    # bytes of keys are rounded to int8: cp 4 differs by 2e-4
    Model("wire_int8", UNTIED, "scale of the head size", ring="--cp-ring-wire int8", tolerance=1e-3),
    *_of_files(),
    *_one_ring(),
    Model("resumed", f"{UNTIED} {RESHARDABLE} --softmax-type learnable", "sink dropped", resumes="dp2cp2"),
    four_layers("mamba_resumed", f"{MAMBA} {RESHARDABLE}", "state in the order of another layout",
        STATES, resumes="cp2",
        splits=("cp4", "dp2cp2")),
    *_recurrent("mamba", f"{MAMBA} {LARGE_EPSILON}"),
    *_alike("delta_product", PRODUCT, "gated_delta_product"),
    *_alike("kimi", KIMI, "gated_delta_net.kda"),
    # ranks exchange states of the delta nets and heads of the Mamba layers, and the other way round
    four_layers("mamba_beside_delta_net_states", f"{BOTH} --cp-ring-document-mask",
        "state across documents",
        f"--cp-ring-recurrent G {BALANCED}", REFERENCE, "documents", splits=("cp4", "tp2cp2",
        "pp2cp2"), drawn_by_tp=True),
    four_layers("mamba_states_beside_delta_net", BOTH.replace("--mamba-num-groups 4",
        "--mamba-num-groups 1"),
        "state in the order of another layout", splits=("cp2",)),
    four_layers("mamba_recomputed", f"{MAMBA} --cp-ring-document-mask {RECOMPUTE}",
        "state across documents", f"{STATES} {BALANCED}", REFERENCE,
        "documents", splits=("cp2",)),
    # heads that do not divide: states without asking
    four_layers("mamba_few_heads", f"{MAMBA} --mamba-num-heads 3 --mamba-num-groups 1",
        "state in the order of another layout", splits=("cp2", "cp4")),
    four_layers("delta_net_few_heads", DELTA_NET.replace("-heads 4",
        "-heads 1").replace("-heads 8", "-heads 2"),
        "state in the order of another layout", splits=("cp4",)),
    *_recurrent("delta_net", DELTA_NET, balanced=2e-6),
    *_recurrent("qwen3_next", QWEN, balanced=2e-6),
    four_layers("qwen3_next_mtp", f"{QWEN} --mtp-num-layers 1",
        "state in the order of another layout",
        baseline=REFERENCE, splits=("cp2", "tp2cp2", "pp2cp2"), drawn_by_tp=True),
    # two keys whose scores are equal but for rounding may change places
    Model("sparse_hybrid", SPARSE_HYBRID, "positions of another split", splits=("cp2", "cp4"), layers=4, tolerance=1e-4),
    Model("sparse_gathered", SPARSE, "positions of another split",
        ring="--cp-comm-type all_gather", splits=PLAIN, tolerance=1e-4, drawn_by_tp=True,
        rejected=GATHERED),
    Model("sparse_gathered_packed_thd", SPARSE, "packed documents in order", "--cp-comm-type all_gather",
        data="thd", splits=("cp2", "cp4"), tolerance=1e-4, drawn_by_tp=True, rejected=GATHERED),
    Model("hybrid_model",
          f"{UNTIED} --hybrid-layer-pattern *-*- --spec cp_ring.megatron.specs hybrid_local",
        "mask widened", layers=4),
    Model("sequence_parallel", UNTIED, "mask widened", ring=SEQUENCE_PARALLEL, splits=("tp2cp2",)),
    Model("moe_sequence_parallel", EXPERTS, "mask widened", ring=SEQUENCE_PARALLEL, splits=("tp2cp2",), experts=2),
    Model("bf16", f"{UNTIED} --bf16", "scale of the head size", tolerance=2**-8),
)  # fmt: skip
