"""TransformerEngine's own context parallelism beside cp_ring, on the same fake GPUs in one run: what
one attention layer launches, sends and holds in memory, and what it costs the host.

python -m tests.fakegpu.beside [--cp 2 4 8] [--cases causal ...] [--rounds 50] [--out FILE]

Real are the code of torch, TransformerEngine and cp_ring, cuDNN's choice of kernels, torch's
allocator, streams, and the calls of NCCL. Not real are values, and how long a kernel or a message
takes. Host time is that of the thread, pinned to a core, where CUDA's and NCCL's calls cost nothing.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.fakegpu import te_build
from tests.fakegpu.accesses import mark
from tests.fakegpu.process import FakeGpus
from tests.gpu.beside import (
    CASES,
    CONTESTANTS,
    RING,
    Groups,
    kind_of,
    layer,
    memory_of,
    rejection,
    step_of,
    table,
)  # fmt: skip

STEPS = (2, 3, 4)
"""Steps 3 to 5, of which each must be like the one before."""


def counts(log, name, number):
    """What a step of a contestant asked of CUDA and NCCL."""
    parts = [f"{name} {number} {way}" for way in ("forward", "backward")]
    forward, backward = (Counter(kind_of(x.name) for x in log.kernels(part)) for part in parts)
    groups = [group for group in log.groups if group.part in parts]
    sizes = {x.words[0]: int(x.words[1]) for x in log.of(None, "communicator")}
    asked = Counter(x.kind for x in log.events if x.part in parts)
    return {
        "launches": forward.total() + backward.total(),
        "kinds": dict(sorted((forward + backward).items())),
        "beside attention in forward": forward.total() - forward["attention"] - forward["operator"],
        "memcpys": asked["copy"] + asked["fill"],
        "waits": asked["sync"] + sum(len(log.copies(part)) for part in parts),
        "allocations": sum(len(log.allocations(part)) for part in parts),
        "events": asked["record"] + asked["wait"],
        "groups": len(groups),
        "messages": sum(len(group.messages) for group in groups),
        "received": sum(
            _received(kind, size, sizes[group.communicator])
            for group in groups
            for kind, _, size in group.messages
        ),
    }


def _received(kind, size, ranks):
    """Bytes that a rank receives by a message; the size of a collective is that of all ranks."""
    return size if kind == "recv" else size * (ranks - 1) // ranks if kind == "all" else 0


def measured(rank, ranks):
    """Whether a rank counts and is timed: the first, the middle and the last one do. The others
    send and receive the same with a kernel that needs no plans of cuDNN, which take seconds.
    """
    return rank in (0, ranks // 2, ranks - 1)


def attention(case, names, counts):
    """Contestants, and what makes the step of each: those of `CONTESTANTS`, and on a rank that does
    not count those of cp_ring.
    """
    groups, inputs = Groups(), CASES[case].draw(torch.empty)
    for name in names:
        if counts or name.startswith(RING):
            more = {} if counts else {"kernel": "flash_aten"}
            yield name, lambda x=(name, CASES[case], groups, more): step_of(layer(*x), inputs)


def on_rank(folder, makers, rounds, deterministic=False, **options):
    """Five steps of each contestant, "<contestant> <step> <pass>" in the log; then their times, one
    rank after another. Writes <rank>.json.
    """
    torch.use_deterministic_algorithms(deterministic)
    made, found = {}, {}
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    module, function = makers.split(":")
    counting, first = measured(rank, ranks), None
    for name, make in getattr(importlib.import_module(module), function)(
        counts=counting, **options
    ):
        mark(f"{name}, made")
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        first = before if first is None else first
        if counting:
            store.set(f"{name} {rank}", "")
        else:  # as long as it takes, where cp_ring would wait for minutes
            counted = [x for x in range(ranks) if measured(x, ranks)]
            store.wait([f"{name} {x}" for x in counted], timedelta(hours=1))
        try:
            step = make()
            found[name] = _steps(name, step, before - first)
            made[name] = step
        except Exception as error:
            found[name] = {"rejected": rejection(error)}
    ctypes.CDLL(None).fakegpu_pause(1)
    if rounds and counting:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        if rank:
            before_it = max(x for x in range(rank) if measured(x, ranks))
            store.wait([f"timed {before_it}"], timedelta(hours=1))
        for name, taken in _times(made, rounds).items():
            found[name]["us"] = taken
        store.set(f"timed {rank}", "")
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _steps(name, step, of_others):
    """Peak memory of the steps that count, without what other contestants hold."""
    for number in range(STEPS[-1] + 1):
        if number == STEPS[0]:
            torch.cuda.reset_peak_memory_stats()
        mark(f"{name} {number} forward")
        step(lambda number=number: mark(f"{name} {number} backward"))
        mark(f"{name}, between")
    return {
        "allocated": torch.cuda.max_memory_allocated() - of_others,
        "reserved": torch.cuda.max_memory_reserved() - of_others,
    }


def _times(made, rounds):
    """Microseconds of the host for a step of each: the median of rounds in which all take turns."""
    taken = {name: [] for name in made}
    gc.collect()
    gc.disable()
    for _ in range(rounds + 2):
        for name, step in made.items():
            start = time.thread_time_ns()
            step(int)
            taken[name].append(time.thread_time_ns() - start)
    gc.enable()
    return {name: median(each[2:]) / 1000 for name, each in taken.items()}


def compare(
    gpus, ranks, case, rounds=0, capability=90,
    makers="tests.fakegpu.beside:attention", **options,
):  # fmt: skip
    """A row for each contestant: counts, memory and time are those of the `measured` rank that has
    most, allocations those of the step that has most, received bytes the mean of all ranks. Raises
    `AssertionError` where steps differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = gpus.run(
            "tests.fakegpu.beside:on_rank", ranks, capability, folder=folder, makers=makers,
            rounds=rounds, case=case, **options,
        )  # fmt: skip
        facts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    stubs = set().union(*(log.stubs() for log in logs))
    assert not stubs, f"nothing stands for {stubs}"
    rows = []
    for name in facts[0]:
        row = {"case": case, "cp": ranks, "contestant": name}
        counting = [(log, x[name]) for rank, (log, x) in enumerate(zip(logs, facts, strict=True))
                    if measured(rank, ranks)]  # fmt: skip
        if rejected := [each["rejected"] for _, each in counting if "rejected" in each]:
            rows.append(row | {"rejected": rejected[0]})
            continue
        for log, each in counting:
            steps = [counts(log, name, number) for number in STEPS]
            allocations = max(step.pop("allocations") for step in steps)
            assert steps[0] == steps[1] == steps[2], f"steps differ: {row}, {steps}"
            each |= steps[0] | {"allocations": allocations}
        most = max((each for _, each in counting), key=lambda each: each["launches"])
        row |= {fact: max(x[fact] for _, x in counting) for fact in most if fact != "kinds"}
        all_ranks = [
            counts(log, name, STEPS[0])["received"]
            for log, x in zip(logs, facts, strict=True)
            if name in x
        ]
        rows.append(row | {"kinds": most["kinds"], "received": sum(all_ranks) / len(all_ranks)})
    return rows


def _of_kinds(row):
    return ", ".join(f"{kind} {count}" for kind, count in row["kinds"].items())


COLUMNS = {
    "launches, memcpys": lambda row: f"{row['launches']}, {row['memcpys']}",
    "forward beside attention": lambda row: f"{row['beside attention in forward']}",
    "waits, allocations": lambda row: f"{row['waits']}, {row['allocations']}",
    "events": lambda row: f"{row['events']}",
    "groups, messages": lambda row: f"{row['groups']}, {row['messages']}",
    "MiB received": lambda row: f"{row['received'] / 2**20:.0f}",
    "MiB allocated, reserved": memory_of,
    "host us, a hop": lambda row: (
        f"{row['us']:.0f}, {row['us'] / row['cp']:.0f}" if "us" in row else "not measured"
    ),
    "launches by kind": _of_kinds,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--layers", action="store_true", help="one layer of Megatron's instead")
    parser.add_argument("--rounds", type=int, default=50, help="of host times; 0 for none")
    parser.add_argument("--capability", type=int, choices=(80, 90, 100), default=90)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args()
    gpus, rows = FakeGpus(te_build.VERSION), []
    of_layers = {"makers": "tests.fakegpu.layers:beside"}
    more = of_layers if options.layers else {"names": options.contestants}
    what = ", a layer of Megatron's" * options.layers + ", deterministic" * options.deterministic
    what += f", sm_{options.capability}" * (options.capability != 90)
    for case in ("causal", "documents") if options.layers else options.cases:
        found = [
            row | {"case": case + what}
            for ranks in options.cp
            for row in compare(
                gpus, ranks, case, options.rounds, options.capability,
                deterministic=options.deterministic, **more,
            )
        ]  # fmt: skip
        print(table(found, COLUMNS), flush=True)
        rows += found
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    gpus.close()


if __name__ == "__main__":
    main()
