"""One step of the GPU checks in this process:
`python -m tests.gpu.step NAME DEVICE RESULTS SECONDS [NCCL]`.

Exits with 1 if a check does not hold, and after an error, which is appended to the results.
"""

import faulthandler
import importlib
import os
import shutil
import sys
import traceback
from functools import partial

import torch

from cp_ring.tools import bench
from tests.gpu.job import Job

STEPS = {
    "facts": ("step:facts",),  # the machine and the software
    "a": ("rings:suite",),  # the conformance suite for each kernel
    "b": ("rings:accuracy",),  # rings of 2, 4 and 8 ranks against float64, over one rank
    # merges and sums by Triton against torch operations; quantized keys
    "c": ("rings:merging", "rings:wires"),
    "d": ("graphs:captured",),  # ring attention in CUDA graphs: bits, time a hop
    "e": ("one_device:memory",),  # peak memory for more and more ranks
    "f": ("rings:processes",),  # two processes over gloo, and over NCCL
    # Megatron GPT at cp 2, recomputed, sharded, offloaded, two microbatches at a time
    "g": ("training:training",),
    # tiles at the sizes of training against float64, with merged lse
    "values": ("measure:values",),
    "streams": ("measure:streams",),  # does attention wait for messages, do messages for attention
    "tiles": ("measure:tiles",),  # TFLOP/s by tile and kernel
    "empties": ("measure:empties",),  # what empty tiles of packed calls cost
    "merges": ("measure:merges",),  # GB/s of merges and sums
    "replays": ("measure:replays",),  # ranks 0, 3 and 7 of 8, alone
    # beside TransformerEngine's context parallelism on all GPUs: times, values, launches
    "h": ("rings:beside",),
}


def facts(job):
    device = torch.cuda.get_device_properties(0)
    job.row(
        **bench.facts(), cuda=torch.version.cuda, gpu=device.name, memory=device.total_memory,
        cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version(),
        # Triton compiles its launchers with a C compiler.
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
    )  # fmt: skip


def run(name, device, results, nccl=""):
    """Whether all checks of the step hold."""
    job = Job(name, device, results)
    for home in STEPS[name]:
        module, _, function = home.partition(":")
        work = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
        try:
            (partial(work, nccl=nccl) if function == "processes" else work)(job)
        except Exception:
            job.fail(f"{function} failed", error=traceback.format_exc()[-3000:])
    return not job.failed


if __name__ == "__main__":
    name, device, results, seconds, *nccl = sys.argv[1:]
    faulthandler.dump_traceback_later(0.9 * float(seconds))  # says where a step hangs
    sys.exit(0 if run(name, device, results, *nccl) else 1)
