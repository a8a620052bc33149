"""The step that trains a small GPT with Megatron on this device: each row of `ROWS` beside another."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.rank_pool import free_port

MODEL = shlex.split("""
    --num-layers 2 --group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
    --min-lr 1e-4 --lr-decay-iters 40 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 7 --mock-data
    --tokenizer-type NullTokenizer --split 98,1,1 --dataloader-type single --num-workers 0 --train-iters 5 --cp-ring
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo
    --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 4 --num-query-groups 2 --seq-length 2048
    --max-position-embeddings 2048 --vocab-size 4095 --bf16
""")
BF16 = 2**-8  # of losses
WITHOUT_VALUES = (
    "--no-cp-ring-certify --no-check-for-nan-in-loss-and-grad --cp-ring-compare-every 0"
)
READING = "nccl|experts"  # rows that train on what other ranks say, or on numbers of tokens
OVER_NCCL = "--distributed-backend nccl"  # the later of two values counts


@dataclass(frozen=True)
class Row:
    """Losses with `flags` and environment variables on `cp` ranks, which are within `limit` those
    with the flags `beside` on `beside_cp` ranks.
    """

    what: str
    cp: int
    flags: str
    beside_cp: int
    beside: str = ""
    variables: str = ""
    limit: float = BF16


EXPERTS = """--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall"""
RECOMPUTED = """--hidden-dropout 0.1 --deterministic-mode --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --no-cp-ring-certify --cp-ring-recompute"""
FINE = """--fine-grained-activation-offloading --offload-modules core_attn attn_proj
    --min-offloaded-tensor-size 1024"""
LAYERS, FIRST = "--cpu-offloading-num-layers 1", "NVTE_CPU_OFFLOAD_V1=1"
LOCAL = "--hidden-dropout 0 --transformer-impl local"
ROWS = (
    Row("cp 2", 2, "--hidden-dropout 0", 1, "--hidden-dropout 0"),
    Row("local layers", 2, LOCAL, 1, LOCAL),
    # The fastest kernels add gradients up in any order, so two runs of them differ on a GPU.
    Row("replay, as keep", 2, f"{RECOMPUTED} replay", 2, f"{RECOMPUTED} keep", limit=0),
    Row(
        "two microbatches at a time",
        2,
        f"--hidden-dropout 0 {EXPERTS} --overlap-moe-expert-parallel-comm",
        2,
        f"--hidden-dropout 0 {EXPERTS}",
    ),
    Row("FSDP of torch", 1, f"{OVER_NCCL} --use-torch-fsdp2", 1, OVER_NCCL),
    Row(
        "FSDP of Megatron",
        1,
        f"{OVER_NCCL} --use-megatron-fsdp --ckpt-format fsdp_dtensor "
        "--data-parallel-sharding-strategy optim_grads_params",
        1,
        OVER_NCCL,
    ),
    Row("graphs of layers", 1, "--cuda-graph-impl local", 1),
    Row("fine-grained offloading", 1, FINE, 1, variables=FIRST),
    Row("offloaded layers", 1, LAYERS, 1),
    Row("offloaded layers, first version", 1, LAYERS, 1, variables=FIRST),
)


def training(job):
    """Losses of 5 steps of each row, beside those of another; a job that several need runs once."""
    done = {}

    def losses(*key):
        if key not in done:
            done[key] = _train(job, *key)
        return done[key]

    for row in ROWS:
        if not job.values and re.search(READING, row.flags):
            job.row(skipped=row.what, why="it reads values of the device")
            continue
        found = losses(row.cp, row.flags, row.variables)
        wanted = losses(row.beside_cp, row.beside, "")
        if found and wanted and job.values:
            off = max(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))
            job.check(f"losses with {row.what} over those without", off, row.limit)
            job.check("least loss over the first", min(found) / found[0], 0.999, row=row.what)


def _train(job, cp, flags, variables):
    """The losses of 5 training steps on `cp` ranks of this device; none if the job failed."""
    line = [*MODEL, "--transformer-impl", "transformer_engine", *shlex.split(flags)]
    line += ["--context-parallel-size", str(cp), *WITHOUT_VALUES.split() * (not job.values)]
    # Megatron rejects one with FSDP, and makes the choice of attention by its own flag.
    environment = {k: x for k, x in os.environ.items() if not re.fullmatch("NVTE_.*_ATTN", k)}
    environment |= {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8" if "fsdp" in flags else "1",
        "WORLD_SIZE": str(cp),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **dict(x.split("=") for x in variables.split()),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs, ranks = [Path(folder) / f"rank{rank}.log" for rank in range(cp)], []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                command = [sys.executable, "-m", "tests.gpu.pretrain", *line]
                where = environment | {"RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(command, env=where, stdout=file, stderr=subprocess.STDOUT)
                )
        codes = [rank.wait() for rank in ranks]  # the driver's time limit ends all of them
        said = [log.read_text() for log in logs]
    losses = [*map(float, re.findall(r"iteration +\d+/.*?lm loss: (\S+)", "".join(said)))]
    certificate = [text for text in said[0].splitlines() if "certificate:" in text]
    facts = {"cp": cp, "flags": flags, "losses": losses, "exit_codes": codes}
    if any(codes) or len(losses) != 5:
        job.fail("a rank failed", **facts, says=[text[-2500:] for text in said])
        return []
    job.row(**facts, certificate=certificate)
    return losses
