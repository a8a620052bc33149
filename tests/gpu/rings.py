"""Steps in which several ranks share the device: accuracy of whole rings, merges and sums, and
processes over gloo and NCCL.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.comm.codecs import Fp8, Int8
from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, choose
from cp_ring.ops.fused import FusedFunction
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error
from tests import conformance
from tests.accuracy import kinds, ratios
from tests.gpu.job import ERROR
from tests.rings import attend_to_shard

ROUNDED = 1.35
"""The most error of a ring over that of one call. A kernel of a GPU rounds each partial result to
16 bits, where one call rounds once: sqrt(1.5) = 1.22 if both are as large; the same rounding
emulated on the CPU gave at most 1.26 over all masks, at cp 2, 4 and 8.
"""

HEADS = ((8, 8, 64, 64), (8, 1, 128, 128), (8, 2, 192, 128), (8, 2, 256, 256))


def accuracy(job):
    """The error of rings of 2, 4 and 8 ranks against float64, over that of one rank, for every kind
    of mask.
    """
    n, seeds, sizes = (2048, 5, [2, 4, 8]) if job.values else (256, 1, [2, 4])
    for schedule in ("auto", "gather"):
        how = ("auto", "bfloat16", job.device.type)
        try:
            results = ratios(
                kinds(n), sizes, *how, sizes=(8, 2, job.sizes.d), seeds=seeds, schedule=schedule
            )
        except KernelError as error:
            job.fail("rejected", schedule=schedule, why=str(error))
            continue
        for result in results:
            where = {"schedule": schedule, **{name: result[name] for name in ("mask", "cp")}}
            job.check("out over one rank", result["out"], ROUNDED, **where)
            job.check(
                "gradients over one rank",
                max(result[x] for x in ("dq", "dk", "dv")),
                ROUNDED,
                **where,
            )


def merging(job):
    """Merges and sums by Triton against torch operations, in rings of 4: batch 2, value heads of
    192, queries without keys.
    """
    n = 4096 if job.values else 64
    masks = {
        "causal": Mask.causal(n),
        "queries without keys": Mask.documents([0, n // 8, n // 2], n=n),
        "window": Mask.causal(n, window=(n // 5, 0)),
    }
    case = Case.draw(n, b=2, h=4, g=2, d=64, e=192, dtype=job.sizes.dtype)
    moved, ring = Case(*(x.to(job.device) for x in case)), LocalRing(4)
    for name, mask in masks.items():
        for schedule in ("ring", "auto"):
            plan = Plan.build(mask, Layout.zigzag(n, 4), schedule=schedule)
            results, seconds = {}, {}
            for way in ("triton", "torch"):
                with _torch_operations() if way == "torch" else nullcontext():
                    ring.run(attend_to_shard, moved, plan)  # compiles
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    results[way] = ring.run(attend_to_shard, moved, plan)
                    torch.cuda.synchronize()
                    seconds[way] = time.perf_counter() - start
            where = {"mask": name, "schedule": schedule}
            job.row(**where, seconds=seconds, triton_rejected=_rejected())
            for part, ours, theirs in zip(
                ("out", "dq", "dk", "dv"),
                zip(*results["triton"], strict=True),
                zip(*results["torch"], strict=True),
                strict=True,
            ):
                x, y = torch.cat(ours).float(), torch.cat(theirs).double()
                job.check(f"{part}: not finite", float(not x.isfinite().all()), 0, **where)
                # Both round once to bf16, perhaps to neighbors.
                job.check(f"{part}: Triton against torch", error(x, y), 4e-3, **where)

    job.check("Triton functions that cannot be compiled", len(_rejected()), 0, rejected=_rejected())


def wires(job):
    """Quantized keys and values have the same bits as on the CPU, coded and decoded."""
    k, v = (x.transpose(0, 1).contiguous() for x in job.draw(256)[1:3])
    for codec in (Int8, Fp8):
        results = []
        for keys, values in ((k, v), (k.cpu(), v.cpu())):
            coded = codec(keys, values).encode()
            decoded = torch.empty_like(keys), torch.empty_like(values)
            codec(keys, values).decode(coded, *decoded)
            results.append([x.cpu() for x in (*coded, *decoded)])
        different = [int((x != y).sum()) for x, y in zip(*results, strict=True)]
        job.check(
            "elements that differ from those of the CPU",
            sum(different),
            0,
            wire=codec.name,
            different=different,
        )


@contextmanager
def _torch_operations():
    """In the block no Triton function runs."""
    with mock.patch.object(FusedFunction, "run", lambda self, *args: False):
        yield


def _rejected():
    """The Triton functions that could not be compiled here."""
    modules = [importlib.import_module(f"cp_ring.ops.{name}") for name in ("merge", "sums")]
    functions = [
        x for module in modules for x in vars(module).values() if isinstance(x, FusedFunction)
    ]
    return [f"{x._module}.{x._name}" for x in functions if not (x._untried or x._function)]


def suite(job):
    """The conformance suite for each kernel and property, on head sizes up to 256, in two dtypes."""
    dtypes = torch.bfloat16, torch.float16
    for name, home in REGISTRY.items():
        kernel = importlib.import_module(home).KERNEL
        for dtype in dtypes:
            # cuDNN compiles each size in a tenth of a second or more
            wanted = HEADS if dtype == dtypes[0] else HEADS[:1]
            supported = [x for x in wanted if kernel.rejection(job.device, dtype, *x[2:]) is None]
            for sizes in wanted:
                if sizes not in supported:
                    job.row(
                        kernel=name,
                        dtype=dtype,
                        heads=sizes,
                        rejected=kernel.rejection(job.device, dtype, *sizes[2:]),
                    )
            for prop in conformance.PROPERTIES if supported else ():
                what = _fault(
                    partial(
                        conformance.check, kernel, job.device, dtype, only=prop, heads=supported
                    )
                )
                job.check(prop, float(bool(what)), 0, kernel=name, dtype=dtype, fault=what)


def _fault(work):
    try:
        work()
        return ""
    except AssertionError as wrong:
        return str(wrong)
    except Exception as wrong:  # a launch that failed, say: the next property may still run
        return f"{type(wrong).__name__}: {str(wrong)[:400]}"


def processes(job, nccl=""):
    """Two processes on this device: over gloo through host memory with each kernel; over NCCL with
    the library `nccl`.
    """
    for kernel in [kernel.name for kernel in job.kernels()]:
        _ring(job, "gloo", kernel, {})
    if not nccl:
        job.row(
            backend="nccl",
            skipped="--nccl names no library of NCCL 2.32 or later, which lets ranks share a device",
        )
        return
    settings = {
        "LD_PRELOAD": nccl,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }
    best = choose("auto", device=job.device, dtype=job.sizes.dtype, d=64, e=64).name
    _ring(job, "nccl", best, settings)


def _ring(job, backend, kernel, settings):
    where = {"backend": backend, "kernel": kernel}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "-m", "tests.gpu.ring", backend, kernel, folder],
            env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode:
            job.fail("a rank failed", **where, says=done.stderr[:6000])
        for out in sorted(Path(folder).iterdir()):
            for mask, errors in json.loads(out.read_text()).items():
                job.check("worst of out, dq, dk, dv", max(errors), ERROR, mask=mask, **where)


def beside(job):
    """TransformerEngine's own context parallelism and cp_ring on all GPUs of this machine; counted
    on two fake ones. The table is in the output of the steps.
    """
    gpus = torch.cuda.device_count()
    if job.values and gpus < 2:
        job.row(skipped="beside", why="it takes two GPUs")
        return
    of_gpus = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*of_gpus, "-m", "tests.gpu.beside", job.out]
    if not job.values:
        command = ["tests.fakegpu.beside", "--cp", "2", "--cases", "causal", "--rounds", "1"]
    place = Path(__file__).resolve().parents[2]  # where the fake GPU's libraries were built
    done = subprocess.run([sys.executable, "-m", *command], cwd=None if job.values else place)
    job.check("the comparison failed", float(bool(done.returncode)), 0)
