"""One attention layer, forward and backward, by TransformerEngine's own context parallelism and by
cp_ring, on the same ranks in the same processes.

torchrun --nproc-per-node GPUS -m tests.gpu.beside [RESULTS]     times, values, launches, memory

`tests.fakegpu.beside` counts what the same contestants ask of fake GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cp_ring
from tests.rings import off

DOCUMENTS = (4096, 1024, 8192, 3072)
"""Lengths of packed documents, again and again: 16,384 tokens, all divisible by two parts a rank."""


@dataclass(frozen=True)
class Case:
    """A mask, and the sizes of one rank: tokens, h query heads and g key/value heads of d, values
    of e.
    """

    window: int = 0
    packed: bool = False
    tokens: int = 8192
    h: int = 32
    g: int = 8
    d: int = 128
    e: int = 128

    def draw(self, fill=torch.randn):
        """q, k, v, dout: [tokens, 1, heads, size], without the 1 for packed documents."""
        sizes = (self.h, self.d), (self.g, self.d), (self.g, self.e), (self.h, self.e)
        row = (self.tokens,) if self.packed else (self.tokens, 1)
        made = [fill((*row, *x), device="cuda", dtype=torch.bfloat16) for x in sizes]
        return [*(x.requires_grad_() for x in made[:3]), made[3]]

    def ends(self, ranks):
        """Where the documents of the whole sequence begin and end."""
        ends, total = [0], self.tokens * ranks
        for number in range(total):
            if ends[-1] >= total:
                break
            length = DOCUMENTS[number % len(DOCUMENTS)] * self.tokens // 8192
            ends.append(min(ends[-1] + length, total))
        return ends


CASES = {
    "causal": Case(),
    "documents": Case(packed=True),
    "window": Case(window=4096),
    "mla": Case(g=32, d=192),
}
TE, RING = "TransformerEngine", "cp_ring"
CONTESTANTS = {
    f"{TE} p2p": {"comm": "p2p"},
    f"{TE} a2a": {"comm": "a2a"},
    f"{TE} all_gather": {"comm": "all_gather"},
    f"{TE} a2a+p2p": {"comm": "a2a+p2p"},
    RING: {},
    f"{RING} ring": {"schedule": "ring"},
    f"{RING} heads": {"heads": 0},
    f"{RING} flash_aten": {"kernel": "flash_aten"},
    f"{RING} beneath {TE}": {"comm": "p2p", "beneath": {}},
}
"""`heads` 0 stands for the number of ranks."""


class Groups:
    """The group of all ranks, and those in which pairs exchange heads and rings cross pairs; with
    their communicators, so that no rank waits for another one later.
    """

    def __init__(self):
        self.world, self.size, self.rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
        pairs = [[x, x + 1] for x in range(0, self.size, 2)]
        rings = [list(range(x, self.size, 2)) for x in range(2)]
        self.levels = [
            next(group for ranks, group in made if self.rank in ranks)
            for made in ([(x, dist.new_group(x)) for x in cut] for cut in (pairs, rings))
        ]
        self.stream = torch.cuda.Stream()
        for group in (self.world, *self.levels):
            connect(group)


def connect(group):
    """Make the communicators of a group and, for messages that torch does not batch, those of each
    two neighbors on its ring. All ranks of the group must call it.
    """
    x, size, place = torch.zeros(1, device="cuda"), group.size(), group.rank()
    dist.all_reduce(x, group=group)
    if size > 2:
        send = partial(dist.isend, x, group=group, group_dst=(place + 1) % size)
        receive = partial(dist.irecv, x.clone(), group=group, group_src=(place - 1) % size)
        # two ranks make theirs at the same time
        for start in (receive, send) if place % 2 else (send, receive):
            work = start()
            assert work is not None, "a rank is not in its own group"
            work.wait()


def layer(name, case, groups, more=None):
    """The attention of a contestant, with `more` options. What rejects a case raises when it is
    called.
    """
    options = CONTESTANTS[name] | (more or {})
    if "beneath" in options:
        return _beneath(_stock(options["comm"], case, groups), more or {})
    if "comm" in options:
        return _stock(options["comm"], case, groups)
    if options.get("heads") == 0:
        options["heads"] = groups.size
    if case.packed:
        options |= {"cu_seqlens": case.ends(groups.size)}
    elif case.window:
        options |= {"window_size": (case.window - 1, 0)}
    options |= {"qkv_format": "thd" if case.packed else "sbhd", "causal": True}
    return partial(cp_ring.ring_attention, group=groups.world, **options)


def _beneath(layer, options):
    """The layer with the ring beneath it, which is there in its calls alone."""
    from cp_ring.integrations.transformer_engine import use_ring

    def call(q, k, v):
        undo = use_ring(**options)
        try:
            return layer(q, k, v)
        finally:
            undo()

    return call


def _stock(comm, case, groups):
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        case.h, (case.d, case.e), num_gqa_groups=case.g, attention_dropout=0.0,
        qkv_format="thd" if case.packed else "sbhd",
        attn_mask_type="padding_causal" if case.packed else "causal",
        window_size=(case.window - 1, 0) if case.window else None,
    )  # fmt: skip
    cp_group = groups.levels if comm == "a2a+p2p" else groups.world
    module.set_context_parallel_group(cp_group, list(range(groups.size)), groups.stream, comm)
    more = {}
    if case.packed:
        ends = torch.tensor(case.ends(groups.size), dtype=torch.int32, device="cuda")
        longest = max(DOCUMENTS) * case.tokens // 8192
        more = dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ends
        ) | {"max_seqlen_q": longest, "max_seqlen_kv": longest}

    def call(q, k, v):
        return module(q, k, v, **more).unflatten(-1, (case.h, case.e))

    return call


def step_of(attend, inputs):
    """The step of an attention, which calls `between` between forward and backward: it returns out,
    dq, dk and dv.
    """
    *leaves, dout = inputs

    def step(between=int):
        out = attend(*leaves)
        between()
        # the engine's own thread would free the tensors of a step while the next one begins
        with torch.autograd.set_multithreading_enabled(False):
            return out, *torch.autograd.grad(out, leaves, dout)

    return step


def rejection(error):
    """The first line of what a contestant says of a case that it does not take."""
    return next(iter(str(error).splitlines()), type(error).__name__).split(". Please run")[0]


KINDS = {
    "cudnn": "attention", "flash_fwd": "attention", "dq_dk_dv": "attention",
    # what the operators of attention launch around their kernel
    "seed_and_offset": "operator", "dot_do_o": "operator", "convert_dq": "operator",
    "splitkv_combine": "operator", "reduce_kernel": "operator", "_to_offsets": "operator",
    "_merge": "merges", "correction": "merges", "log1p": "merges", "copy_addcmul": "merges",
    "_add": "sums", "CUDAFunctor_add": "sums",
    "WithCast": "casts",
    "direct_copy": "copies", "CatArray": "copies", "index": "copies",
    "FillFunctor": "fills", "nccl": "messages",
}  # fmt: skip
"""What a launch is, by the first of these that its name has; else it is "others"."""


def kind_of(kernel):
    """Of KINDS' kinds."""
    return next((kind for part, kind in KINDS.items() if part in kernel), "others")


def memory_of(row):
    """Peaks, by torch's allocator."""
    return f"{row['allocated'] / 2**20:.0f}, {row['reserved'] / 2**20:.0f}"


def table(rows, columns):
    """A table in Markdown for each case: a line for each contestant, whose cells have a value for
    each number of ranks.
    """
    text = []
    for case in dict.fromkeys(row["case"] for row in rows):
        sizes = list(dict.fromkeys(row["cp"] for row in rows if row["case"] == case))
        text += [f"{case}, cp {' / '.join(map(str, sizes))}:", ""]
        text += [f"| contestant | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name in dict.fromkeys(row["contestant"] for row in rows if row["case"] == case):
            mine = [x for x in rows if (x["case"], x["contestant"]) == (case, name)]
            cells = [_joined(mine, column) for column in columns.values()]
            if all("rejected" in row for row in mine):
                cells = [f"rejected: {mine[0]['rejected']}", *[""] * (len(columns) - 1)]
            text.append(f"| {name} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _joined(rows, column):
    cells = ["rejected" if "rejected" in row else column(row) for row in rows]
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def on_gpus(case, groups, repeats=20):
    """A row for each contestant: milliseconds of forward and of both passes on the slowest rank,
    all taking turns; how far out and gradients are from those of the first that takes the case; and
    what torch's profiler counts in one step.
    """
    inputs, made, rows = CASES[case].draw(), {}, {}
    first = {}
    for name in CONTESTANTS:
        row = {"case": case, "cp": groups.size, "contestant": name}
        try:
            step = step_of(layer(name, CASES[case], groups), inputs)
            for _ in range(3):
                results = tuple(x.detach() for x in step(int))
            rows[name] = row | _profiled(step)
        except Exception as error:
            rows[name] = row | {"rejected": rejection(error)}
            continue
        made[name] = step
        # of packed documents, ranks hold other tokens in cp_ring
        right = first.setdefault(CASES[case].packed and name.startswith(RING), results)
        rows[name]["difference"] = off(results, right)
    times = {name: [] for name in made}
    for _ in range(repeats):
        for name, step in made.items():
            dist.barrier()
            times[name].append(_timed(step))
    for name, each in times.items():
        mine = torch.tensor([median(way) for way in zip(*each, strict=True)], device="cuda")
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        rows[name]["forward_ms"], rows[name]["both_ms"] = mine.tolist()
    return list(rows.values())


def _profiled(step):
    """Launches and waits of a step, and its peak memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(int)
    memory = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(int)
        torch.cuda.synchronize()
    events = found.events()
    device = [x for x in events if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    copies = [x for x in device if x.name.startswith("Mem")]
    kinds = Counter(kind_of(x.name) for x in device if not x.name.startswith("Mem"))
    del kinds["messages"]
    waits = sum("Synchronize" in x.name for x in events) - 1  # the last is this function's
    return memory | {
        "launches": kinds.total(), "kinds": dict(sorted(kinds.items())), "memcpys": len(copies),
        "waits": waits,
    }  # fmt: skip


def _timed(step):
    """Milliseconds of forward, and of forward and backward."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    begin.record()
    step(middle.record)
    end.record()
    end.synchronize()
    return begin.elapsed_time(middle), begin.elapsed_time(end)


ON_GPUS = {
    "launches, memcpys": lambda row: f"{row['launches']}, {row['memcpys']}",
    "waits": lambda row: f"{row['waits']}",
    "MiB allocated, reserved": memory_of,
    "forward ms": lambda row: f"{row['forward_ms']:.2f}",
    "both ms": lambda row: f"{row['both_ms']:.2f}",
    "difference": lambda row: f"{row['difference']:.1e}",
}


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    groups = Groups()
    for case in CASES:
        rows = on_gpus(case, groups)
        if groups.rank == 0:
            print(table(rows, ON_GPUS), flush=True)
            for file in sys.argv[1:]:
                with open(file, "a") as results:
                    results.writelines(json.dumps({"step": "h", **row}) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
