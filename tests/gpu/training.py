"""Steps that train a small GPT with Megatron on this device: recomputation, and context parallel sizes 1 and 2."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.job import Job

MODEL = shlex.split("""
    --num-layers 2 --group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
    --min-lr 1e-4 --lr-decay-iters 40 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 7 --mock-data
    --tokenizer-type NullTokenizer --split 98,1,1 --dataloader-type single --num-workers 0 --train-iters 5 --cp-ring
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo
""")
SIZES = {
    True: "--hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 4 --num-query-groups 2 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 4095 --bf16",
    False: "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 4095 --cp-ring-cpu",
}
BF16, FLOAT32 = 2**-8, 1e-5


def recomputation(job: Job) -> None:
    """`--cp-ring-recompute` keep and replay give the same losses, bit by bit, with hidden dropout and deterministic kernels."""
    flags = shlex.split(
        "--hidden-dropout 0.1 --deterministic-mode "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    cp = 2 if job.cuda else 1
    losses = {kind: _train(job, cp, [*flags, "--cp-ring-recompute", kind, "--no-cp-ring-certify"]) for kind in ("keep", "replay")}
    if all(losses.values()):
        off = max(abs(x - y) for x, y in zip(losses["keep"], losses["replay"], strict=True))
        job.check("losses of keep and replay differ", off, 0, cp=cp)


def training(job: Job) -> None:
    """Losses at cp 1 and cp 2 agree to the precision of the dtype, with TransformerEngine's layers and with local ones."""
    for layers in ("transformer_engine", "local") if job.cuda else ("local",):
        flags = ["--hidden-dropout", "0", "--transformer-impl", layers]
        one, two = (_train(job, cp, flags) for cp in (1, 2))
        if one and two:
            off = max(abs(x / y - 1) for x, y in zip(two, one, strict=True))
            job.check("losses at cp 2 over those at cp 1", off, BF16 if job.cuda else FLOAT32, layers=layers)
            job.check("least loss over the first", min(one) / one[0], 0.999, layers=layers)


def graphs(job: Job) -> None:
    """Losses with CUDA graphs of whole layers, attention in them, are those without."""
    if not job.cuda:
        job.row(skipped="Megatron's CUDA graphs, which need CUDA")
        return
    wanted = _train(job, 1, ["--hidden-dropout", "0"])
    asked = ["--cuda-graph-impl", "local", "--cp-ring-allow-untried", "cuda-graphs"]
    found = _train(job, 1, ["--hidden-dropout", "0", *asked])
    if wanted and found:
        off = max(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))
        job.check("losses with graphs over those without", off, BF16)


def overlap(job: Job) -> None:
    """Losses of two microbatches at a time (--overlap-moe-expert-parallel-comm), on a second stream, are those of one."""
    experts = shlex.split(
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    )
    flags = ["--hidden-dropout", "0", "--bf16", *experts]
    wanted = _train(job, 2, flags)
    found = _train(job, 2, [*flags, "--overlap-moe-expert-parallel-comm", "--cp-ring-allow-untried", "moe-overlap"])
    if wanted and found:
        off = max(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))
        job.check("losses with two microbatches at a time over those with one", off, BF16 if job.cuda else FLOAT32)


def _train(job: Job, cp: int, flags: list[str]) -> list[float]:
    """The losses of 5 training steps on `cp` ranks of this device; none if the job failed."""
    local = [] if "--transformer-impl" in flags else ["--transformer-impl", "transformer_engine" if job.cuda else "local"]
    with tempfile.TemporaryDirectory() as folder:
        line = [*MODEL, *shlex.split(SIZES[job.cuda]), *local, *flags, "--context-parallel-size", str(cp)]
        command = [sys.executable, "-m", "tests.gpu.pretrain", *line, "--cp-ring-run-dir", folder]
        shared = {"WORLD_SIZE": str(cp), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(cp)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                environment = _without_choices_of_te() | shared | {"RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        codes = [rank.wait() for rank in ranks]  # the driver's time limit ends all of them
        steps = Path(folder) / "steps.jsonl"
        losses = [json.loads(step)["lm loss"] for step in steps.read_text().splitlines()] if steps.exists() else []
        failed = any(codes) or len(losses) != 5
        says = {"says": [log.read_text()[-2500:] for log in logs]} if failed else {}
        job.check("a rank failed", float(failed), 0, cp=cp, flags=" ".join(flags), losses=losses, exit_codes=codes, **says)
        certificate = [text for text in logs[0].read_text().splitlines() if "certificate:" in text]
        job.row(cp=cp, certificate=certificate)
        return [] if failed else losses


def _without_choices_of_te() -> dict[str, str]:
    """The environment without TransformerEngine's choices of attention, which Megatron makes by its own flag."""
    return {name: value for name, value in os.environ.items() if not (name.startswith("NVTE_") and name.endswith("_ATTN"))}


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
