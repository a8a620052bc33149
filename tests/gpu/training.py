"""Steps that train a small GPT with Megatron on this device: recomputation, context parallel sizes
1 and 2, sharded parameters, and Megatron's own offloading."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.gpu.job import Job
from tests.megatron import worker
from tests.megatron.launch import fork

MODEL = shlex.split("""
    --num-layers 2 --group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
    --min-lr 1e-4 --lr-decay-iters 40 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 7 --mock-data
    --tokenizer-type NullTokenizer --split 98,1,1 --dataloader-type single --num-workers 0 --train-iters 5 --cp-ring
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo
""")
SIZES = {
    True: "--hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 4095 --bf16",
    False: "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 256 --max-position-embeddings 256 --vocab-size 4095 --cp-ring-cpu",
}
BF16, FLOAT32 = 2**-8, 1e-5
SHARDED = {
    "torch": "--use-torch-fsdp2",
    "Megatron": "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy "
    "optim_grads_params",
}


def recomputation(job: Job) -> None:
    """`--cp-ring-recompute` keep and replay give the same losses, bit by bit, with hidden dropout
    and deterministic kernels.
    """
    flags = shlex.split(
        "--hidden-dropout 0.1 --deterministic-mode "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    cp = 2 if job.cuda else 1
    losses = {
        kind: _train(job, cp, [*flags, "--cp-ring-recompute", kind, "--no-cp-ring-certify"])
        for kind in ("keep", "replay")
    }
    if all(losses.values()):
        off = max(abs(x - y) for x, y in zip(losses["keep"], losses["replay"], strict=True))
        job.check("losses of keep and replay differ", off, 0, cp=cp)


def training(job: Job) -> None:
    """Losses at cp 1 and cp 2 agree to the precision of the dtype, with TransformerEngine's layers
    and with local ones.
    """
    for layers in ("transformer_engine", "local") if job.cuda else ("local",):
        flags = ["--hidden-dropout", "0", "--transformer-impl", layers]
        one, two = (_train(job, cp, flags) for cp in (1, 2))
        if one and two:
            off = max(abs(x / y - 1) for x, y in zip(two, one, strict=True))
            job.check(
                "losses at cp 2 over those at cp 1",
                off,
                BF16 if job.cuda else FLOAT32,
                layers=layers,
            )
            job.check("least loss over the first", min(one) / one[0], 0.999, layers=layers)


def overlap(job: Job) -> None:
    """Losses of two microbatches at a time (--overlap-moe-expert-parallel-comm), on a second
    stream, are those of one.
    """
    experts = shlex.split(
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall"
    )
    flags = ["--hidden-dropout", "0", "--bf16", *experts]
    wanted = _train(job, 2, flags)
    found = _train(
        job,
        2,
        [*flags, "--overlap-moe-expert-parallel-comm"],
    )
    _compare(job, "losses with two microbatches at a time over those with one", found, wanted)


def sharding(job: Job) -> None:
    """Losses with sharded parameters are those without: one rank on a GPU, cp 2 over gloo on the
    CPU.
    """
    cp, common = (1, ["--distributed-backend", "nccl"]) if job.cuda else (2, [])
    plain = _train(job, cp, common)
    for kind, flags in SHARDED.items():
        _compare(
            job,
            f"losses with FSDP of {kind} over those without",
            _train(job, cp, [*common, *flags.split()]),
            plain,
        )


def megatrons_offloading(job: Job) -> None:
    """Losses with Megatron's own offloading of attention are those without; on the CPU with
    stand-ins, fine-grained alone.
    """
    cp = 1 if job.cuda else 2
    plain = _train(job, cp, [])
    if not job.cuda:
        moved = _train(job, cp, [], module="tests.megatron.fine_grained_script")
        _compare(job, "losses with fine-grained offloading over those without", moved, plain)
        return
    fine = (
        "--fine-grained-activation-offloading --offload-modules core_attn attn_proj "
        "--min-offloaded-tensor-size 1024"
    )
    layers, first = "--cpu-offloading-num-layers 1", {"NVTE_CPU_OFFLOAD_V1": "1"}
    for flags, variables in ((fine, first), (layers, {}), (layers, first)):
        moved = _train(job, cp, flags.split(), variables)
        _compare(
            job, f"losses with {flags.split()[0]} over those without", moved, plain, **variables
        )


def _compare(job: Job, what: str, found: list[float], expected: list[float], **facts: str) -> None:
    if found and expected:
        off = max(abs(x / y - 1) for x, y in zip(found, expected, strict=True))
        job.check(what, off, BF16 if job.cuda else FLOAT32, **facts)


def _train(
    job: Job,
    cp: int,
    flags: list[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    module: str = "tests.gpu.pretrain",
) -> list[float]:
    """The losses of 5 training steps on `cp` ranks of this device, which run `module`; none if the
    job failed.
    """
    local = (
        []
        if "--transformer-impl" in flags
        else ["--transformer-impl", "transformer_engine" if job.cuda else "local"]
    )
    with tempfile.TemporaryDirectory() as folder:
        line = [
            *MODEL,
            *shlex.split(SIZES[job.cuda]),
            *local,
            *flags,
            "--context-parallel-size",
            str(cp),
        ]
        # Megatron rejects one with FSDP
        connections = "8" if any("fsdp" in flag for flag in flags) else "1"
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": connections,
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        command = (
            module,
            line,
            _without_choices_of_te() | environment,
        )
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(cp)]
        codes = (
            _processes(command, logs)
            if job.cuda
            else [fork(cp, (*command, folder), target=_forked)]
        )
        said = "".join(log.read_text() for log in logs if log.exists())
        losses = [*map(float, re.findall(r"iteration +\d+/.*?lm loss: (\S+)", said))]
        failed = any(codes) or len(losses) != 5
        facts = {"cp": cp, "flags": " ".join(flags), "losses": losses, "exit_codes": codes}
        if failed:
            job.fail("a rank failed", **facts, says=[log.read_text()[-2500:] for log in logs])
        else:
            job.row(**facts)
        certificate = [text for text in logs[0].read_text().splitlines() if "certificate:" in text]
        job.row(cp=cp, certificate=certificate)
        return [] if failed else losses


def _processes(command: tuple[str, list[str], dict[str, str]], logs: list[Path]) -> list[int]:
    """The exit codes of ranks that are processes of their own; the driver's time limit ends all of
    them.
    """
    module, argv, environment = command
    shared = environment | {
        "WORLD_SIZE": str(len(logs)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            line = [sys.executable, "-m", module, *argv]
            ranks.append(
                subprocess.Popen(
                    line, env=shared | {"RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT
                )
            )
    return [rank.wait() for rank in ranks]


def _forked(
    rank: int,
    ranks: int,
    port: int,
    module: str,
    argv: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Is a rank on the CPU, forked from a process that has imported Megatron already."""
    os.environ.clear()
    os.environ.update(environment | worker.place(rank, ranks, port))
    worker.output_to(Path(folder) / f"rank{rank}.log")
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__")


def _without_choices_of_te() -> dict[str, str]:
    """The environment without TransformerEngine's choices of attention, which Megatron makes by its
    own flag.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("NVTE_") and name.endswith("_ATTN"))
    }


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
