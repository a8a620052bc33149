"""The checks and measurements that need a GPU: one process a step, with a time limit of its own;
results as lines of JSON.

`--device fake` runs the same steps on small shapes on a fake GPU (`tests/fakegpu`), as far as no value
of the device is read. A step that fails, crashes or hangs loses only itself. The exit status is 0
only if every check of every step holds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANGING_S = 1800  # of a step on a fake GPU


@dataclass(frozen=True)
class Step:
    """`functions` are in modules of this folder, `seconds` is the time limit."""

    functions: tuple[str, ...]
    seconds: int
    what: str


STEPS = {
    "a": Step(("rings:suite",), 300, "the conformance suite for each kernel"),
    "b": Step(("rings:accuracy",), 150, "rings of 2, 4 and 8 ranks against float64, over one call"),
    "c": Step(
        ("rings:merging", "rings:wires"),
        90,
        "merges and sums by Triton against torch operations; quantized keys",
    ),
    "d": Step(("graphs:captured",), 120, "ring attention in CUDA graphs: bits, time a hop"),
    "e": Step(("one_device:memory",), 120, "peak memory for more and more ranks"),
    "f": Step(("rings:processes",), 150, "two processes over gloo, and over NCCL"),
    "g": Step(
        ("training:training",),
        600,
        "Megatron GPT at cp 2, recomputed, sharded, offloaded, two microbatches at a time",
    ),
    "h": Step(
        ("rings:beside",),
        600,
        "beside TransformerEngine's context parallelism on all GPUs: times, values, launches",
    ),
}


def run_step(name: str, command: list[str], seconds: float, out: Path, log: Path) -> bool:
    """Runs a step's process and appends how it ended to the results: passed, failed, crashed or
    timed out.
    """
    start = time.monotonic()
    with log.open("ab") as file:
        before = file.tell()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = _ends(process, seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that it started
            code = process.wait()
        code = code if ended else None
    passed = code == 0
    state = (
        "passed"
        if passed
        else "timed out"
        if code is None
        else "failed"
        if code == 1
        else "crashed"
    )
    tail = (
        {}
        if passed
        else {
            "exit_code": code,
            "output": log.read_bytes()[before:][-2000:].decode(errors="replace"),
        }
    )
    append(
        out,
        step=name,
        state=state,
        holds=passed,
        seconds=round(time.monotonic() - start, 1),
        **tail,
    )
    print(
        f"step {name}: {state} in {time.monotonic() - start:.1f} s: {STEPS[name].what}", flush=True
    )
    return passed


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits until the process ends, and returns false after so many seconds. The process stays, so
    that its group does too.
    """
    end = time.monotonic() + seconds
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def append(out: Path, **facts: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "fake"))
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or ".") / "results.jsonl"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="steps; all by default"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, help="start no step after so many seconds"
    )
    parser.add_argument(
        "--nccl",
        default="",
        help="a libnccl.so.2 of 2.32 or later, which lets ranks share a device",
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    log, end, passed = options.out.with_suffix(".log"), time.monotonic() + options.seconds, True
    facts = subprocess.run(
        [sys.executable, "-m", "tests.gpu.facts", options.device], capture_output=True, text=True
    )
    if facts.returncode:
        print(f"tests.gpu.run: {facts.stderr[-2000:]}", file=sys.stderr)
        return 2
    append(options.out, **json.loads(facts.stdout))
    for name in options.only:
        # On a fake GPU nothing is measured, and cores may be shared: the limit is only against
        # hanging.
        limit = min(
            STEPS[name].seconds if options.device == "cuda" else HANGING_S, end - time.monotonic()
        )
        if limit < 5:
            passed = False
            append(options.out, step=name, state="not started: no time left", holds=False)
            continue
        command = [
            sys.executable,
            "-m",
            "tests.gpu.step",
            name,
            options.device,
            str(options.out),
            str(limit),
        ]
        passed = (
            run_step(name, command + [options.nccl] * bool(options.nccl), limit, options.out, log)
            and passed
        )
    append(options.out, holds=passed)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
