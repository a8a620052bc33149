"""The factors of the pairwise table, what the documents say does not go together, and the jobs of a
row.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from tests.megatron.launch import Outcome
from tests.pairwise.covering import Row, cover
from tests.parity import models as parity
from tests.parity.matrix import Cell, Job, Verdict, compare
from tests.parity.models import REFERENCE, STOCK, Model, Split

LATENT = f"{parity.LATENT} --untie-embeddings-and-output-weights"
MLA_MOE_MTP = (
    f"{LATENT} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --mtp-num-layers 1"
)
MODELS = {
    "gqa": parity.UNTIED,
    "mqa": f"{parity.ROPE} --group-query-attention --num-query-groups 1 --qk-layernorm "
    "--untie-embeddings-and-output-weights",
    "mla": LATENT,
    "moe": parity.EXPERTS,
    "mla+moe+mtp": MLA_MOE_MTP,
    "mtp": f"{parity.UNTIED} --mtp-num-layers 2",
    "window": f"{parity.UNTIED} --window-size 11,0 --window-attn-skip-freq 2",
    "sinks": f"{parity.UNTIED} --softmax-type learnable",
    "learned positions": parity.LEARNED,
    "yarn": f"{parity.HEADS} {parity.YARN}",
    "mrope": f"{parity.HEADS} {parity.MULTIMODAL}",
    "mamba": parity.MAMBA,
    "delta net": parity.DELTA_NET,
}
_TIED = ("learned positions", "yarn", "mrope")
_EXPERTS, _LATENT, _RECURRENT = (
    ("moe", "mla+moe+mtp"),
    ("mla", "mla+moe+mtp"),
    ("mamba", "delta net"),
)
SPLITS = {split.name: split for split in parity.SPLITS if not split.like} | {
    "tp2cp2 sp": Split("tp2cp2sp", cp=2, tp=2),
    "cp1": Split("cp1", cp=1),
    "tp2": Split("tp2", cp=1, tp=2),
}
DOCUMENTS = {  # flags, and the kind of microbatches (see `tests.parity.deliveries`)
    "none": ("", ""),
    "uneven loss": ("", "uneven"),
    "packed thd": ("--cp-ring-document-mask", "thd"),
    "document mask": ("--cp-ring-document-mask", "documents"),
    "inter-document": ("--dataloader-inter-document-masking --eod-mask-loss", "documents"),
    "shared prefix": ("--cp-ring-mask-kinds shared-prefix", "shared_prefix"),
    "images": ("--cp-ring-mask-kinds images", "images"),
    "global tokens": ("--cp-ring-mask-kinds global", "global"),
}
_DECLARED = ("shared prefix", "images", "global tokens")
COMM = {  # {u} x {r} ranks exchange heads x are a ring; a node has {u} ranks
    "direct": "",
    "schedule ring": "--cp-ring-schedule ring",
    "route ring": "--cp-ring-route ring --cp-ring-num-slots 3",
    "relay": "--cp-ring-route relay --cp-ring-node-size {u}",
    "all_gather": "--cp-comm-type all_gather",
    "a2a": "--cp-comm-type a2a",
    "a2a+p2p": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {u} {r}",
    "heads 2": "--cp-ring-heads 2",
}
_HEADS = ("a2a", "a2a+p2p", "heads 2")
RECOMPUTE = {
    "none": "",
    "keep": parity.RECOMPUTE,
    "replay": f"{parity.RECOMPUTE} --cp-ring-recompute replay",
    "selective": "--recompute-granularity selective",
}
SHARDING = {
    "replicas": "",
    "distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--dist-ckpt-optim-fully-reshardable",
    "fsdp2": "--use-torch-fsdp2",
    "megatron fsdp": f"{parity.MEGATRON_FSDP} optim_grads_params",
    "megatron fsdp optim": f"{parity.MEGATRON_FSDP} optim",
}
_MEGATRON_FSDP = ("megatron fsdp", "megatron fsdp optim")
BOUNDS = {"int8": 0.024, "fp8": 0.1}  # of quantized keys: those of the certificate

_RESUMED = ("cp1", "cp4", "tp2", "tp2cp2")
_ON_TP = ("tp2cp2", "tp2cp2 sp", "tp2")
_OFF_TP = tuple(name for name in SPLITS if name not in _ON_TP)
_WITHOUT_SP = tuple(name for name in SPLITS if name != "tp2cp2 sp")
FACTORS: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "split": tuple(name for name in SPLITS if SPLITS[name].cp > 1),
    "layout": ("zigzag", "contiguous", "balanced"),
    "documents": tuple(DOCUMENTS),
    "wire": ("plain", "latent", "int8", "fp8"),
    "comm": tuple(COMM),
    "recompute": tuple(RECOMPUTE),
    "offload": ("no", "yes"),
    "sharding": tuple(SHARDING),
    "loss chunk": ("no", "yes"),
    "dropout": ("no", "yes"),
    "dtype": ("float32", "bf16"),
    "rows": ("1", "2"),
    "resume": ("no", *_RESUMED),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values that the documents say do not go together, and a part of the line; none where the test
    data cannot be so.

    example: what the row that tries it has beside the last of these values.
    """

    line: str
    values: dict[str, tuple[str, ...]]
    example: dict[str, str] = dataclasses.field(default_factory=dict)

    def broken(self, row: Row) -> bool:
        return all(row.get(factor) in values for factor, values in self.values.items())


_NOT_LATENT = tuple(name for name in MODELS if name not in _LATENT)
RULES = (
    Rule("", {"documents": ("packed thd",), "layout": ("contiguous", "balanced")}),
    Rule("", {"documents": ("packed thd",), "rows": ("2",)}),
    # these test data have one position a token
    Rule("", {"documents": ("packed thd",), "model": ("mrope",)}),
    Rule("", {"model": _RECURRENT, "split": ("tp2cp2 sp",)}),
    Rule("", {"model": _RECURRENT, "dtype": ("bf16",)}),  # their kernels here are in float32
    Rule("needs --multi-latent-attention", {"wire": ("latent",), "model": _NOT_LATENT}),
    Rule("the MLA latent has no head dimension to split", {"wire": ("latent",), "comm": _HEADS}, {"model": "mla"}),
    Rule("needs --sequence-parallel", {"model": _EXPERTS, "split": ("tp2cp2",)}),
    Rule("needs --sequence-parallel", {"model": _EXPERTS, "split": _WITHOUT_SP, "resume": ("tp2",
         "tp2cp2")}, {
         "split":
         "cp2"}),
    Rule("", {"model": ("mla+moe+mtp", *_RECURRENT), "split": _ON_TP, "resume": ("cp1", "cp4")}),
    Rule("", {"model": ("mla+moe+mtp", *_RECURRENT), "split": _OFF_TP, "resume": ("tp2", "tp2cp2")}),
    Rule("whose state runs along the sequence", {"model": _RECURRENT, "documents": _DECLARED}),
    Rule("leave core_attn out", {"offload": ("yes",), "recompute": ("selective",)}),
    Rule("takes all ranks of the job", {"sharding": _MEGATRON_FSDP, "split": ("pp2cp2",)},
        {"sharding": "megatron fsdp", "dtype": "bf16"}),
    Rule("needs --bf16 or --fp16", {"sharding": _MEGATRON_FSDP, "dtype": ("float32",), "resume": _RESUMED},
        {"sharding": "megatron fsdp"}),
    Rule("not supported with pipeline parallelism", {"sharding": ("fsdp2",), "split": ("pp2cp2",)}),
    Rule("not supported with expert parallelism", {"sharding": ("fsdp2",), "model": _EXPERTS}, {
         "split":
         "cp4"}),
    Rule("requires --untie-embeddings-and-output-weights", {"sharding": ("fsdp2",), "model": _TIED}),
    Rule("Megatron takes whole weights for the parts", {"sharding": ("fsdp2",), "model": _RECURRENT,
         "resume": _RESUMED}),
    Rule("positions travel with the keys", {"wire": ("latent", "int8", "fp8"), "dropout": ("yes",)}),
    Rule("does not support --use-megatron-fsdp", {"wire": ("latent",), "sharding": _MEGATRON_FSDP}, {
         "model":
         "mla"}),
    Rule("does not support --recompute-granularity selective", {"wire": ("latent",), "recompute": (
         "selective",)},
        {"model": "mla"}),
    Rule("does not support --use-torch-fsdp2", {"wire": ("latent",), "sharding": ("fsdp2",)}, {
         "model":
         "mla"}),
    Rule("needs --data-parallel-sharding-strategy optim_grads_params", {"sharding": (
         "megatron fsdp optim",),
         "resume": _RESUMED},
        {"dtype": "bf16"}),
)  # fmt: skip
WANTED = [
    {
        "model": model,
        "split": split,
        "sharding": sharding,
        "resume": resume,
        "dtype": dtype,
        "wire": wire,
    }
    for model, split, sharding, resume, dtype, wire in (
        ("mla", "tp2cp2", "fsdp2", "tp2", "float32", "plain"),
        ("mla", "tp2cp2", "megatron fsdp", "tp2", "bf16", "plain"),
        ("mla", "tp2cp2 sp", "distributed optimizer", "tp2", "float32", "latent"),
        ("mla", "dp2cp2", "fsdp2", "cp4", "float32", "plain"),
        ("mla+moe+mtp", "tp2cp2 sp", "megatron fsdp", "tp2", "bf16", "plain"),
    )
]


def allowed(row: Row) -> bool:
    """Whether the documents support the values of (a part of) a row together."""
    return not any(rule.broken(row) for rule in RULES)


def rows(count: int, seed: int) -> list[tuple[Row, str]]:
    """The rows of the table, each with a part of the line by which it must be rejected, or "".

    First one row for each rule, with the first value of every factor that it does not name.
    """
    default = {factor: values[0] for factor, values in FACTORS.items()}
    rejected = [
        (
            default | {factor: values[-1] for factor, values in rule.values.items()} | rule.example,
            rule.line,
        )
        for rule in RULES
        if rule.line
    ]
    found, missing = cover(FACTORS, allowed, count - len(rejected), seed, WANTED)
    assert not missing, missing
    return [*rejected, *((row, "") for row in found)]


def _rounding(row: Row) -> float:
    """The largest error of a row with plain keys; in bf16 one rounding, or two with experts, whose
    choice is not smooth.
    """
    if row["dtype"] == "bf16":
        return 2**-7 if row["model"] in _EXPERTS else 2**-8
    return 2e-6 if row["model"] == "delta net" and row["layout"] == "balanced" else 1e-6


def _model(name: str, row: Row) -> Model:
    documents, data = DOCUMENTS[row["documents"]]
    flags = [MODELS[row["model"]], documents, f"--micro-batch-size {row['rows']}"]
    # Adam makes whole steps of the rounding noise of gradients that are nearly 0 (2e-5 in the norm
    # of the third step, of documents in multi-latent attention); 1e-8 is Megatron's.
    flags += ["--adam-eps 1e-5"]
    flags += ["--attention-dropout 0.2"] if row["dropout"] == "yes" else []
    flags += [parity.SEQUENCE_PARALLEL] if row["split"] == "tp2cp2 sp" else []
    flags += ["--bf16"] if row["dtype"] == "bf16" else []
    # which Megatron adds in bf16 else, at cp 1 too
    sums = row["dtype"] == "bf16" and row["sharding"] in _MEGATRON_FSDP
    ring = ["--megatron-fsdp-main-grads-dtype fp32"] if sums else []
    ring += [
        RECOMPUTE[row["recompute"]],
        SHARDING[row["sharding"]],
        f"--cp-ring-wire {row['wire']}",
    ]
    ring += [f"--cp-ring-layout {row['layout']}"]
    ring += ["--cp-ring-offload"] if row["offload"] == "yes" else []
    ring += ["--cp-ring-loss-chunk 7"] if row["loss chunk"] == "yes" else []
    # Stock gated delta net layers are another model on two tensor-parallel ranks.
    no_stock = row["model"] in (*_LATENT, "delta net") or row["dropout"] == "yes" or documents
    return Model(
        name, " ".join(flags), "", " ".join(ring), REFERENCE if no_stock else STOCK, data,
        layers=4 if row["model"] in _RECURRENT else 2, experts=2 if row["model"] in _EXPERTS else 1,
        tolerance=max(_rounding(row), BOUNDS.get(row["wire"], 0)),
        drawn_by_tp=row["model"] in (*_LATENT, *_RECURRENT),
    )  # fmt: skip


def _split(name: str, comm: str, experts: int) -> Split:
    split = SPLITS[name]
    flags = COMM[comm].format(u=2, r=split.cp // 2) if split.cp > 1 else ""
    dp = max(split.dp, experts // (split.cp * split.dp))
    return dataclasses.replace(split, dp=dp, flags=f"{flags} {split.flags}")


@dataclasses.dataclass(frozen=True)
class Case:
    """A row as jobs: a baseline, and one job, or one that saves after two steps and one that
    resumes elsewhere.

    before: the job whose checkpoint the first job and the baseline begin with, if there are
    pipeline stages.
    """

    name: str
    cell: Cell
    before: tuple[Job, ...]
    baseline: Job
    jobs: tuple[Job, ...]

    @classmethod
    def of(cls, number: int, row: Row, folder: Path) -> Case:
        name = f"row{number}"
        model = _model(name, row)
        cell = Cell(model, _split(row["split"], row["comm"], model.experts))
        *before, baseline, first = cell.jobs()
        if row["resume"] == "no":
            return cls(name, cell, tuple(before), baseline, (first,))
        saved = folder / f"{name}-saved"
        then = Cell(model, _split(row["resume"], row["comm"], model.experts)).job()
        save = shlex.split(f"--save {saved} --save-interval 2 --exit-interval 2")
        first = dataclasses.replace(first, flags=(*first.flags, *save))
        then = dataclasses.replace(
            then, name=f"{then.name}-resumed", flags=(*then.flags, "--load", str(saved)), start=""
        )
        return cls(name, cell, tuple(before), baseline, (first, then))

    def verdict(self, outcomes: list[Outcome], baseline: Outcome) -> Verdict:
        """Of the losses and gradient norms of all jobs, one after another; the first that did not
        train counts.
        """
        bad = next((outcome for outcome in outcomes if outcome.code or outcome.rejected), None)
        whole = bad or Outcome(
            [loss for outcome in outcomes for loss in outcome.losses],
            [norm for outcome in outcomes for norm in outcome.grad_norms],
            [loss for outcome in outcomes for loss in outcome.validation],
        )
        return compare(self.cell, whole, baseline)
