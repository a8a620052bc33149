"""Runs programs on the fake GPUs: a process that has imported torch with the fake libraries, and
forks the ranks of each program.

It is started by `tests.fakegpu.process`, and reads a line of JSON for each program from standard
input.
"""

import fcntl
import functools
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import triton.compiler

# What ranks would import, each on its own; the device is untouched until they are forked.
IMPORTED = (
    "cp_ring.ops.merge_triton",
    "cp_ring.ops.sums_triton",
    "torch._dynamo",
    "torch.distributed.tensor",
    "triton.experimental.gluon.nvidia.hopper",
    "triton.compiler",
    "cp_ring.attention",
    "cp_ring.api",
    "cp_ring.kernels.flash_aten",
    "tests.fakegpu.programs",
)


def main():
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("triton.runtime.cache").triton_key()  # a digest of all of Triton
    triton.compiler.compile = _one_at_a_time(triton.compiler.compile)
    for line in sys.stdin:
        task = json.loads(line)
        ranks = [_forked(task, rank) for rank in range(task["size"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(codes), flush=True)


def _one_at_a_time(compile_kernel):
    """Ranks that need the same kernel at once: one compiles it, the others find it in the cache."""

    @functools.wraps(compile_kernel)
    def compiled(*args, **kwargs):
        with open(Path(os.environ["TRITON_CACHE_DIR"]).with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_kernel(*args, **kwargs)

    return compiled


def _forked(task, rank):
    child = os.fork()
    if child:
        return child
    code = 1
    folder = Path(task["folder"])
    try:
        with open(folder / f"{rank}.txt", "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.environ.update(
            FAKEGPU_LOG=str(folder / f"{rank}.log"), FAKEGPU_DEVICE=task["device"],
            RANK=str(rank), WORLD_SIZE=str(task["size"]), LOCAL_RANK="0",
        )  # fmt: skip
        if task["size"] > 1:
            store = torch.distributed.FileStore(str(folder / "store"), task["size"])
            torch.distributed.init_process_group(
                "nccl", store=store, rank=rank, world_size=task["size"]
            )
        module, name = task["program"].split(":")
        getattr(importlib.import_module(module), name)(**task["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without torch's ends, which wait for devices


if __name__ == "__main__":
    main()
