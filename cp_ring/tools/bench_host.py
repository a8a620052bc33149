"""`cp-ring bench host`: time of the host in a hop, beyond the library's attention and the messages.

A rank of 8, and one without others, runs alone on the CPU: causal attention, one source a hop,
batch 1, 4 heads, tiny tiles. It goes through the adapter of TransformerEngine. The library itself
is replaced by functions that return tensors of the right shapes at once, and the transport by
copies; both are timed and left out. What is left is what the host of a GPU does between two
launches of attention: Python, the launches of merges and sums, views, and the adapter.

This file is also a program. It measures the cp_ring that it imports, which may be another version.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

PASSES = ("forward", "backward")
_ROUNDS = 3
_RANKS = {8: 3, 1: 0}
"""Context-parallel ranks, and which one of them runs."""
_TOKENS, _HEADS, _SIZE = 256, 4, 8


def run(repeats: int, against: Path | None = None) -> list[dict[str, Any]]:
    """Results {pass, cp, hop_us, cp_ring}: microseconds of the host a hop, the least of `repeats`
    calls.

    Each version is measured `_ROUNDS` times, in processes of their own and in turn. The least
    counts, because other work on the machine only adds. `against` is a checkout of another version
    of cp_ring, measured too.
    """
    own = Path(__file__).parents[2]
    folders = {"this version": own} | ({str(against): against} if against else {})
    measured: dict[tuple[str, str], list[float]] = {}
    for _ in range(_ROUNDS):
        for version, folder in folders.items():
            for name, times in _measured_by(folder, repeats).items():
                measured.setdefault((version, name), []).extend(times)
    return [
        {
            "pass": name.split()[0],
            "cp": int(name.split()[1]),
            "hop_us": min(times),
            "cp_ring": version,
        }
        for (version, name), times in measured.items()
    ]


def _measured_by(folder: Path, repeats: int) -> dict[str, list[float]]:
    """What this file measures in a process that imports cp_ring from `folder`."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, str(repeats)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: dict[str, list[float]] = json.loads(done.stdout)
    return times


def measure(repeats: int) -> dict[str, list[float]]:
    """Microseconds of the host a hop by pass and ranks, of `repeats` calls; as many before them do
    not count.
    """
    from cp_ring import Layout, Mask, Plan, ring_attention

    clock = _Clock()
    _install(clock)
    times: dict[str, list[float]] = {}
    for cp, rank in _RANKS.items():
        transport: Any = _Loopback(rank, cp)
        transport.post = clock.counting(transport.post)
        n = cp * _TOKENS
        # older versions have one source a hop
        scheduled = "schedule" in inspect.signature(Plan.build).parameters
        options: Any = {"schedule": "ring"} if scheduled else {}
        plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp), **options)
        hops = len(plan.rank_plan(rank).hops)
        inputs = [
            torch.zeros(_TOKENS, 1, _HEADS, _SIZE, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        dout = torch.zeros_like(inputs[0])
        q, k, v = inputs
        attend = partial(
            ring_attention, q, k, v, transport, plan=plan, kernel="host", qkv_format="sbhd"
        )
        forwards, backwards = (times.setdefault(f"{name} {cp}", []) for name in PASSES)
        for index in range(2 * repeats):
            out, forward = clock.time(attend)
            _, backward = clock.time(partial(torch.autograd.grad, out, inputs, dout))
            if index >= repeats:
                forwards.append(forward / hops * 1e6)
                backwards.append(backward / hops * 1e6)
    return times


class _Loopback:
    """A transport without peers: what arrives is zeros, at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def post(self, batch: Any) -> Any:
        from cp_ring.comm.transport import Done

        for _, buffers in batch.receives:
            for x in buffers:
                x.zero_()
        return Done()


class _Clock:
    """Times work without the time in the functions that it wraps."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time does not count."""

        @functools.wraps(function)  # adapters read the parameters
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            self._left_out += time.thread_time() - start
            return result

        return run

    def time[T](self, work: Callable[[], T]) -> tuple[T, float]:
        """What `work` returns, and its seconds."""
        self._left_out, start = 0.0, time.thread_time()
        result = work()
        return result, time.thread_time() - start - self._left_out


def _install(clock: _Clock) -> None:
    """Registers the kernel `host`: the adapter of TransformerEngine, with functions that compute
    nothing.
    """
    from cp_ring.kernels import REGISTRY, te_library, transformer_engine

    class Names:
        def __getitem__(self, name: str) -> str:
            return name

    tensors: dict[tuple[int, ...], torch.Tensor] = {}

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if shape not in tensors:
            tensors[shape] = torch.zeros(shape, dtype=dtype)
        return tensors[shape]

    def taking(names: tuple[str, ...], result: Callable[..., Any]) -> Callable[..., Any]:
        def function(**arguments: Any) -> Any:
            return result(*(arguments[name] for name in "qkv"))

        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=0) for name in names]
        )
        return clock.counting(function)

    def forward(q: torch.Tensor, *_: torch.Tensor) -> Any:
        return zeros(*q.shape, dtype=q.dtype), [zeros(q.shape[1], q.shape[2], q.shape[0], 1), None]

    def backward(*inputs: torch.Tensor) -> Any:
        return [zeros(*x.shape, dtype=x.dtype) for x in inputs]

    shared = te_library.SHARED  # parameters that the adapter has values for
    enums = types.SimpleNamespace(
        **{name: Names() for name in ("QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType")}
    )
    extension = types.SimpleNamespace(get_fused_attn_backend=lambda *args: 1)
    parts: tuple[Any, ...] = (
        taking((*shared, *te_library.FORWARD), forward),
        taking((*shared, *te_library.BACKWARD), backward),
        {"No_Backend": 0},
        enums,
        extension,
        {torch.bfloat16: "bf16", torch.float16: "fp16"},
        None,
        92600,
        "2.20.2",
    )
    library = te_library.Library(*parts[: len(te_library.Library._fields)])
    te_library.installed = lambda: library  # type: ignore[assignment]

    class HostKernel(transformer_engine.TransformerEngineKernel):
        devices = ("cpu",)

    module = types.ModuleType("cp_ring_host_kernel")
    module.KERNEL = HostKernel()  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    REGISTRY["host"] = module.__name__


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(int(sys.argv[1]))))
