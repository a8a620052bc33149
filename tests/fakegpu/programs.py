"""What ranks run on the fake GPUs."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

import cp_ring
from cp_ring.ops import blocks_triton, merge_triton, sums_triton
from cp_ring.ops.segments import Segments
from cp_ring.plan.sizes.device_rates import NAMED, running
from tests.fakegpu.accesses import mark, note, recorded
from tests.fakegpu.plants import PLANTS


def rings(cases, steps=3, planted=False, captured=False):
    """Calls of `ring_attention` one after another, each forward and backward `steps` times;
    "<case> <step>" is the part of the log.

    planted: a case has the name of a fault, which is there in its calls. captured: then the calls
    are captured as a graph, in the part "<case> capture".
    """
    with recorded():
        for name, options in cases.items():
            with PLANTS[name]() if planted else nullcontext():
                _steps(name, lambda options=options: attend(**options), steps, captured)
    mark("end")
    note(f"rates {next(name for name, rates in NAMED.items() if rates == running())}")


def _steps(name, call, steps, captured):
    for step in range(steps):
        mark(f"{name} {step}")
        call()
    if captured:
        mark(f"{name} capture")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()


def on_two_streams(case, planted):
    """Two calls of one plan, the second on a stream that does not wait for the first one's."""
    with recorded(), PLANTS[planted]() if planted else nullcontext():
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            mark(f"{stream.stream_id}")
            with torch.cuda.stream(stream):
                attend(**case)
    mark("end")


def attend(tokens=256, sizes=(4, 2, 64, 64), sink=False, latent=0, **options):
    """Of `tokens` on each rank; sizes are h, g, d, e. latent: the size of the latents that stand
    for keys and values, whose keys have 64 rotated channels.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    h, g, d, e = sizes
    q, k, v = (_empty(1, tokens, *shape) for shape in ((h, d), (g, d), (g, e)))
    leaves = [q, k, v]
    if latent:
        parts = ((1, tokens, latent), (1, tokens, 64), (g * (d - 64 + e), latent))
        leaves = [q, *(_empty(*shape) for shape in parts)]
        k, v = cp_ring.LatentKeys(*leaves[1:], g, d - 64), None
    if sink:
        leaves.append(_empty(h))
        options["sink"] = leaves[-1]
    torch.use_deterministic_algorithms(bool(options.get("deterministic")))
    out = cp_ring.ring_attention(q, k, v, group, **options)
    # The engine's own thread would free the tensors of a step while the next one begins: how much
    # memory is needed would be chance.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(out, leaves, torch.empty_like(out))


class Launched(NamedTuple):
    looks: int  # Triton's, at all arguments
    arguments: list  # of its launcher, tensors by address


def _launched(function, arguments):
    run, launcher, looks, given = JITFunction.run, CudaLauncher.__call__, [], []

    def look(*args, **more):
        looks.append(args)
        return run(*args, **more)

    def launch(self, *args):
        leaves = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor | int)]
        given.extend(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in leaves)
        launcher(self, *args)

    with (
        mock.patch.object(JITFunction, "run", look),
        mock.patch.object(CudaLauncher, "__call__", launch),
    ):
        function(*arguments)
    return Launched(len(looks), given)


def _empty(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def fused(folder, sizes, dtypes, skipped=0, registers=None):
    """Writes the PTX of all variants of merge and sum that calls with these head sizes and dtypes of
    tensors launch, as <function>-<parts>-<size>-<dtype>-<dtype of the running sum>.ptx. Each is
    launched twice; aligned, the second time without Triton's look at all arguments.

    Faults: partial results begin `skipped` numbers after an aligned address, and kernels have so
    many `registers`.
    """
    if registers:
        run = JITFunction.run
        JITFunction.run = lambda *args, **more: run(*args, **more | {"maxnreg": registers})
    for size, name, total, parts in product(sizes, dtypes, ("float32", ""), range(1, 5)):
        made = [
            _empty(1, 100, 4, size + skipped).to(getattr(torch, name))[..., skipped:]
            for _ in range(parts)
        ]
        result = made[0].contiguous()
        running = result.to(getattr(torch, total)) if total else result
        segments = Segments(np.array([[0, 100, 0, 1, *[0, 1] * parts]]).T)
        lse = torch.empty(1, 4, 100, device="cuda")
        calls = {
            "merge": (merge_triton, (segments, made, [lse] * parts, running, lse, result)),
            "add": (
                sums_triton,
                (segments, [(x, x) for x in made], [running] * 2, [result] * 2, 1),
            ),
        }
        for function, (module, arguments) in calls.items():
            jit = getattr(module, f"_{function}")
            jit.device_caches.clear()
            blocks_triton._compiled.clear()
            first, again = (_launched(getattr(module, function), arguments) for _ in range(2))
            (kernel,) = jit.device_caches[0][0].values()
            assert first.looks == 1 and again == (skipped or 0, first.arguments)
            path = Path(folder) / f"{function}-{parts}-{size}-{name}-{total or name}.ptx"
            path.write_text(kernel.asm["ptx"])
