"""TransformerEngine's own context parallelism beside cp_ring, on the same fake GPUs in one run: what
one attention layer launches, sends and holds in memory, and what it costs the host.

python -m tests.fakegpu.beside [--cp 2 4 8] [--cases causal ...] [--rounds 50] [--out FILE]

Real are the code of torch, TransformerEngine and cp_ring, cuDNN's choice of kernels, torch's
allocator, streams, and the calls of NCCL. Not real are values, and how long a kernel or a message
takes. Host time is that of the thread, pinned to a core, where CUDA's and NCCL's calls cost nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from tests.fakegpu import te_build
from tests.fakegpu.accesses import mark
from tests.fakegpu.log import Log
from tests.fakegpu.process import FakeGpus
from tests.gpu.beside import CASES, CONTESTANTS, Groups, Layer, layer, rejection, step, table

STEPS = (2, 3, 4)
"""Steps 3 to 5, of which each must be like the one before."""

KINDS = {
    "cudnn": "attention", "flash_fwd": "attention", "dq_dk_dv": "attention",
    # what the operators of attention launch around their kernel
    "seed_and_offset": "operator", "dot_do_o": "operator", "convert_dq": "operator",
    "splitkv_combine": "operator", "reduce_kernel": "operator", "_to_offsets": "operator",
    "_merge": "merges", "correction": "merges", "log1p": "merges", "copy_addcmul": "merges",
    "_add": "sums", "CUDAFunctor_add": "sums",
    "WithCast": "casts",
    "direct_copy": "copies", "CatArray": "copies", "index": "copies",
    "FillFunctor": "fills",
}  # fmt: skip
"""What a launch is, by the first of these that its name has; else it is "others"."""


def kind_of(kernel: str) -> str:
    """Of KINDS' kinds."""
    return next((kind for part, kind in KINDS.items() if part in kernel), "others")


def counts(log: Log, name: str, number: int) -> dict[str, Any]:
    """What a step of a contestant asked of CUDA and NCCL."""
    parts = [f"{name} {number} {way}" for way in ("forward", "backward")]
    forward, backward = (Counter(kind_of(x.name) for x in log.kernels(part)) for part in parts)
    groups = [group for group in log.groups if group.part in parts]
    sizes = {x.words[0]: int(x.words[1]) for x in log.of(None, "communicator")}
    asked = Counter(x.kind for x in log.events if x.part in parts)
    return {
        "launches": forward.total() + backward.total(),
        "beside, forward": forward.total() - forward["attention"] - forward["operator"],
        **{kind: forward[kind] + backward[kind] for kind in dict.fromkeys([*KINDS.values(), "others"])},
        "memcpys": asked["copy"] + asked["fill"],
        "waits": asked["sync"] + sum(len(log.copies(part)) for part in parts),
        "allocations": sum(len(log.allocations(part)) for part in parts),
        "events": asked["record"] + asked["wait"],
        "groups": len(groups),
        "messages": sum(len(group.messages) for group in groups),
        "bytes": sum(
            _received(kind, size, sizes[group.communicator])
            for group in groups
            for kind, _, size in group.messages
        ),
    }  # fmt: skip


def _received(kind: str, size: int, ranks: int) -> int:
    """What a rank receives by a message; the size of a collective is that of all ranks' parts."""
    return size if kind == "recv" else size * (ranks - 1) // ranks if kind == "all" else 0


def on_rank(folder: str, case: str, names: list[str], rounds: int, deterministic: bool) -> None:
    """Five steps of each contestant, "<contestant> <step> <pass>" in the log; then their times, all
    ranks one after another. Writes <rank>.json.
    """
    groups, made, found = Groups(), dict[str, Layer](), dict[str, dict[str, Any]]()
    torch.use_deterministic_algorithms(deterministic)
    inputs = CASES[case].draw(torch.empty)
    for name in names:
        mark(f"{name}, made")
        gc.collect()
        torch.cuda.empty_cache()
        try:
            made[name] = layer(name, CASES[case], groups)
            found[name] = _steps(name, made[name], inputs)
        except Exception as error:
            made.pop(name, None)
            found[name] = {"rejected": rejection(error)}
    ctypes.CDLL(None).fakegpu_pause(1)
    if rounds:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        store = _get_default_store()
        if groups.rank:
            store.wait([f"timed {groups.rank - 1}"], timedelta(hours=1))
        for name, taken in _times(made, inputs, rounds).items():
            found[name]["us"] = taken
        store.set(f"timed {groups.rank}", "")
    Path(folder, f"{groups.rank}.json").write_text(json.dumps(found))


def _steps(name: str, attend: Layer, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """Peak memory of the steps that count."""
    for number in range(STEPS[-1] + 1):
        if number == STEPS[0]:
            torch.cuda.reset_peak_memory_stats()
        mark(f"{name} {number} forward")
        step(attend, inputs, lambda number=number: mark(f"{name} {number} backward"))
        mark(f"{name}, between")
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _times(made: dict[str, Layer], inputs: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Microseconds of the host for a step of each: the median of rounds in which all take turns."""
    taken: dict[str, list[int]] = {name: [] for name in made}
    gc.collect()
    gc.disable()
    for _ in range(rounds + 2):
        for name, attend in made.items():
            start = time.thread_time_ns()
            step(attend, inputs)
            taken[name].append(time.thread_time_ns() - start)
    gc.enable()
    return {name: median(each[2:]) / 1000 for name, each in taken.items()}


def compare(
    gpus: FakeGpus,
    ranks: int,
    case: str,
    names: list[str],
    rounds: int = 0,
    capability: int = 90,
    deterministic: bool = False,
) -> list[dict[str, Any]]:
    """A row for each contestant: of its counts, memory and time those of the rank that has most.
    Raises `AssertionError` where steps differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = gpus.run(
            "tests.fakegpu.beside:on_rank", ranks, capability, folder=folder, case=case,
            names=names, rounds=rounds, deterministic=deterministic,
        )  # fmt: skip
        facts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = []
    for name in names:
        row = {"case": case, "cp": ranks, "contestant": name}
        of_ranks = [each[name] for each in facts]
        rejected = [each["rejected"] for each in of_ranks if "rejected" in each]
        if rejected:
            rows.append(row | {"rejected": rejected[0]})
            continue
        for log, each in zip(logs, of_ranks, strict=True):
            steps = [counts(log, name, number) for number in STEPS]
            assert steps[0] == steps[1] == steps[2], f"steps differ: {row}, {steps}"
            each |= steps[0]
        rows.append(row | {fact: max(x[fact] for x in of_ranks) for fact in of_ranks[0]})
    assert not set().union(*(log.stubs() for log in logs)), "a function of the libraries is a stub"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=50, help="of host times; 0 for none")
    parser.add_argument("--capability", type=int, choices=(80, 90, 100), default=90)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args()
    gpus, rows = FakeGpus(te_build.VERSION), []
    for case in options.cases:
        for ranks in options.cp:
            rows += compare(gpus, ranks, case, options.contestants, options.rounds,
                            options.capability, options.deterministic)  # fmt: skip
            print(table(rows[-len(options.contestants) :]), flush=True)
    gpus.close()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
