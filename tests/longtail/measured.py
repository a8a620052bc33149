"""python -m tests.longtail.measured: step time of a small GPT on long-tailed documents, in one ring
over four ranks and in two groups of two, through Megatron's training loop.

Two nodes of two CPU ranks each, in network namespaces with slow links (tests.comm.two_nodes); it
needs root, `ip` and `tc`. All jobs train on the same tokens and begin with the same weights; each
runs `--rounds` times, in turn. Prints medians of their steps after the first `SKIPPED`, and the
largest relative difference of a loss from that of the first job.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.comm.two_nodes import NODE, RANKS, ROOT, SHARES, namespaces
from tests.longtail.shapes import RANK_TOKENS, SHAPES
from tests.megatron import documents, worker

SKIPPED = 3
GROUPS, ALL = "--context-parallel-size 2", "--context-parallel-size 4"
BALANCED = "--cp-ring-layout balanced"
WAYS = {
    "one ring": (f"{ALL} {BALANCED} --cp-ring-heads 2 --micro-batch-size 2", 2),
    "groups of 2, balanced": (f"{GROUPS} {BALANCED} --micro-batch-size 1", 1),
    "groups of 2, zigzag": (f"{GROUPS} --micro-batch-size 1", 1),
}
"""The flags of each way, and how many rows of a group are one row of it."""
MODEL = shlex.split("""
    --cp-ring-cpu --num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 8 --kv-channels 32
    --group-query-attention --num-query-groups 4 --position-embedding-type rope --normalization RMSNorm --swiglu
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --make-vocab-size-divisible-by 8 --dataloader-type single --num-workers 1 --lr 1e-3 --min-lr 1e-4
    --lr-decay-iters 40 --seed 7 --eval-iters 0 --eval-interval 1000 --log-interval 1 --cp-ring --cp-ring-document-mask
    --calculate-per-token-loss --distributed-timeout-minutes 30
""")


def lengths(shape, tokens_per_rank, steps):
    """Lengths of documents of a shape for so many steps, made smaller as the rows of groups are."""
    each = SHAPES[shape]
    scale = 2 * tokens_per_rank / (each.group * RANK_TOKENS)
    drawn = each.documents(1, int(RANKS * tokens_per_rank * steps / scale))
    return [max(2, int(length * scale)) for length in drawn]


def job(way, asked, prefix):
    flags, rows = WAYS[way]
    sizes = {
        "--seq-length": rows * 2 * asked.tokens,
        "--max-position-embeddings": 4 * asked.tokens,
        "--global-batch-size": 2,
        "--train-iters": asked.steps,
    }
    argv = [*MODEL, *documents.data(prefix), "--split", "100,0,0", *flags.split()]
    argv += [str(word) for pair in sizes.items() for word in pair]
    return {"name": way, "argv": argv, "fault": "", "data": "joined " if rows > 1 else ""}


def train(made, port, job, folder):
    """Runs a job: losses of its steps, and their seconds but for the first `SKIPPED`."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    processes = []
    for rank, name in enumerate(made):
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.longtail.measured"]
        words += ["--rank", str(rank), str(port), json.dumps(job), str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cp0"}
        processes.append(subprocess.Popen(words, env=environment, cwd=ROOT))
        with suppress(FileNotFoundError):
            (SHARES / name / "cgroup.procs").write_text(str(processes[-1].pid))
    codes = [process.wait() for process in processes]
    assert not any(codes), f"{job['name']}: {codes}\n{log.read_text()[-3000:]}"
    steps = [
        json.loads(line) for line in (folder / f"{job['name']}.0.jsonl").read_text().splitlines()
    ]
    times = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log.read_text())
    return [step["loss"] for step in steps], [float(ms) / 1000 for ms in times[SKIPPED:]]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.longtail.measured", description=__doc__)
    parser.add_argument("--shapes", default="fine-tuning,agentic")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", type=float, default=2e8, help="bytes a second")
    parser.add_argument("--between", type=float, default=2e7, help="bytes a second")
    asked = parser.parse_args()
    print(f"{vars(asked)}\ndocuments, way: median of the steps in s, over one ring, loss")
    with (
        namespaces(asked.inside, asked.between) as made,
        tempfile.TemporaryDirectory() as temporary,
    ):
        folder, port = Path(temporary), 29_501
        for shape in asked.shapes.split(","):
            drawn = lengths(shape, asked.tokens, asked.steps + 2)
            prefix = documents.write(folder / shape, lengths=drawn)
            found = {way: ([], []) for way in WAYS}
            for _ in range(asked.rounds):
                for way, (losses, times) in found.items():
                    some = train(made, port, job(way, asked, prefix), folder)
                    losses[:] = some[0]
                    times += some[1]
                    port += 1
            first, base = found["one ring"][0], statistics.median(found["one ring"][1])
            for way, (losses, times) in found.items():
                off = max(abs(x - y) / abs(y) for x, y in zip(losses, first, strict=True))
                middle = statistics.median(times)
                print(f"{shape}, {way}: {middle:.3f}, {middle / base:.2f}, {off:.1e}", flush=True)


def rank(number, port, job, folder):
    """A rank of a job."""
    os.environ |= worker.place(number, RANKS, port)
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCAL_RANK": str(number % NODE), "LOCAL_WORLD_SIZE": str(NODE)}  # fmt: skip
    worker.output_to(folder / "log")
    worker.run(job, folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        number, port, job_of_all, where = sys.argv[2:]
        rank(int(number), int(port), json.loads(job_of_all), Path(where))
    else:
        main()
