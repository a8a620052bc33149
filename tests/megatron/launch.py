"""Starts test jobs of several ranks on loopback: commands with torch's elastic launcher, training
in forked ranks.
"""

import contextlib
import json
import multiprocessing as mp
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

from tests.megatron import worker
from tests.rank_pool import LIMIT_S, start

HERE = Path(__file__).parent

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 128
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
""")
DATA = shlex.split("""
    --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --split 90,5,5 --dataloader-type single --num-workers 0
""")
TRAIN = shlex.split("""
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 40 --eval-iters 0 --eval-interval 1000
    --log-interval 100 --seed 7
""")
TINY = MODEL + DATA + TRAIN
RING = shlex.split("--cp-ring --cp-ring-cpu --context-parallel-size 2")


def environment():
    """The environment of a rank: one thread, loopback, and no settings of a surrounding job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}


def launch(ranks, command, timeout_s=LIMIT_S, python_path=""):
    """Runs `python command` on `ranks` ranks and waits for it; the output holds both streams."""
    elastic = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *elastic, *command],
        env=environment() | ({"PYTHONPATH": python_path} if python_path else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def train(ranks, jobs, folder, common=TINY, data=""):
    """Runs the jobs (name: flags beside `common`) one after another on `ranks` ranks; traces go to
    `folder`.

    A job whose first word is no flag runs that script by cp_ring.run; `data` is the name of one of
    tests.parity.deliveries.
    """
    for name, flags in jobs.items():
        done = attempt(ranks, name, flags, folder, common, data=data)
        assert not done.code, f"{name}: exit code {done.code} {done.rejected}\n{done.output}"


@dataclass
class Outcome:
    """Of a job: loss and gradient norm of each step, losses of the validation passes; exit code,
    end of the output, rejection.
    """

    losses: list = field(default_factory=list)
    grad_norms: list = field(default_factory=list)
    validation: list = field(default_factory=list)
    code: int = 0
    output: str = ""
    rejected: str = ""


def attempt(ranks, name, flags, folder, common=TINY, fault="", data=""):
    """Runs one job as `train` does, and tells what became of it."""
    log = folder / f"{name}.log"
    script = [] if flags[0].startswith("-") else flags[:1]
    argv = script + common + flags[len(script) :]
    job = {"name": name, "argv": argv, "fault": fault, "data": data}
    code = fork(ranks, (job, folder, log))
    steps, lines = trace(folder, name).values(), lines_of(folder, name)
    passes = {
        line["pass"]: line["validation"] for line in lines if line.get("validation") is not None
    }
    return Outcome(
        losses=[step["loss"] for step in steps],
        grad_norms=[step["grad_norm"] for step in steps],
        validation=[passes[number] for number in sorted(passes)],
        code=code,
        output=log.read_text()[-6000:] if log.exists() else "",
        rejected=next((line["rejected"] for line in lines if "rejected" in line), ""),
    )


def fork(ranks, job, timeout_s=LIMIT_S, target=worker.rank):
    """Runs `target(rank, ranks, port, *job)` in processes forked from one that has imported
    Megatron, else seconds of CPU each.

    Returns 0, or the code of a rank that failed: one that was killed, if there is, which others
    fail after. They are killed then.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.imported"])
    # held here, so that nobody else takes its port
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        leader = processes[0].pid if processes else 0
        processes.append(
            context.Process(
                target=_in_a_group, args=(target, leader, rank, ranks, store.port, *job)
            )
        )
        start(processes[-1])
    end = time.monotonic() + timeout_s
    failed = 0
    try:
        while not failed and any(p.exitcode is None for p in processes):
            mp.connection.wait([p.sentinel for p in processes if p.exitcode is None], timeout=1)
            failed = 124 if time.monotonic() > end else _first_failure(processes)
    finally:
        # also what a rank that was killed has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[0].pid, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.join()
    return failed or _first_failure(processes)


def _in_a_group(target, leader, *args):
    """Is a rank in the process group of the first one, which may not have made it yet."""
    for _ in range(1000):
        with contextlib.suppress(PermissionError):
            os.setpgid(0, leader)
            break
        time.sleep(0.01)
    target(*args)


def _first_failure(processes):
    """0 if none has failed; several may have until this is asked, after one that was killed."""
    codes = [process.exitcode for process in processes if process.exitcode]
    return min(codes, key=lambda code: code > 0, default=0)


def trace(folder, name):
    """Per step of job `name`: loss, grad_norm, and the sorted checksums of all sequences that any
    rank read.
    """
    steps = {}
    for line in lines_of(folder, name):
        if "step" in line:
            step = steps.setdefault(
                line["step"], {"loss": None, "grad_norm": line["grad_norm"], "rows": set()}
            )
            step["loss"] = line["loss"] if line["loss"] is not None else step["loss"]
            step["rows"] |= set(line["rows"])
    return steps


def lines_of(folder, name):
    """What all ranks of job `name` have written."""
    return [
        json.loads(line)
        for path in sorted(folder.glob(f"{name}.*.jsonl"))
        for line in path.read_text().splitlines()
    ]
