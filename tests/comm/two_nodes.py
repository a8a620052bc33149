"""Two "nodes" of two CPU ranks each, in network namespaces whose links are limited inside a node
and between nodes: the default of `ring_attention` against every shape, and against another
checkout.

    python -m tests.comm.two_nodes --against /path/to/another/checkout

It needs root, `ip` and `tc`. For each mask it times forward and backward of every shape in turn,
five times, and prints medians. Plans are made before. Layouts, hops and heads are chosen for these
heads, for nodes of two ranks, and for the speeds that the ranks measure together at the start: of a
kernel call, and of an exchange inside a node and between nodes. Gloo sends and receives in turn, so
an exchange has half of a link's limit. Where the kernel can limit processors (cgroups, version 1), a
rank has two fifths of one, lest a rank with much work run faster while others wait.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RANKS, NODE = 4, 2
SHARES = Path("/sys/fs/cgroup/cpu")
HEADS, SIZE = 8, 64
SHAPES = {
    "default": {},
    "heads 1": {"heads": 1},
    "heads 2": {"heads": 2},
    "heads 4": {"heads": 4},
    "heads 1, gather": {"heads": 1, "schedule": "gather"},
    "heads 1, ring": {"heads": 1, "schedule": "ring"},
    "heads 1, zigzag": {"heads": 1, "layout": "zigzag"},
    "heads 2, zigzag": {"heads": 2, "layout": "zigzag"},
}


def masks(n):
    """The masks by name."""
    from cp_ring.plan import Mask

    drawn = {}
    for seed in range(3):
        lengths = np.random.default_rng(seed).lognormal(np.log(n / 12), 1.2, 200).astype(int) + 1
        ends = np.cumsum(lengths)
        drawn[f"documents {seed}"] = Mask.documents([0, *ends[ends < n].tolist(), n])
    return {
        "causal": Mask.causal(n),
        "window": Mask.causal(n, (n // 8, 0)),
        **drawn,
        "shared prefix": Mask.shared_prefix([(n // 4, [n // 8] * 6)]),
    }


def run(tool, *words):
    subprocess.run([tool, *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces(inside, between):
    """A namespace for each rank, all on one bridge; what a rank sends is limited to so many bytes a
    second to the ranks of its own node, and to all others together.
    """
    name = f"cpr{os.getpid() % 10_000}"
    made = [f"{name}n{rank}" for rank in range(RANKS)]
    try:
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "link", "set", name, "up")
        for rank, each in enumerate(made):
            run("ip", "netns", "add", each)
            port = f"{name}p{rank}"
            run("ip", "link", "add", port, "type", "veth", "peer", "name", "cp0", "netns", each)
            run("ip", "link", "set", port, "master", name, "up")
            if SHARES.exists():
                share = SHARES / each
                share.mkdir()
                (share / "cpu.cfs_period_us").write_text("5000")
                (share / "cpu.cfs_quota_us").write_text("2000")
            here = ("ip", "netns", "exec", each)
            run(*here, "ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", "cp0")
            for device in ("lo", "cp0"):
                run(*here, "ip", "link", "set", device, "up")
            tc = (*here, "tc")
            run(*tc, "qdisc", "add", "dev", "cp0", "root", "handle", "1:", "htb", "default", "20")
            for number, rate in (("10", inside), ("20", between)):
                limit = f"{int(8 * rate)}bit burst 64k cburst 64k quantum 9000"
                run(
                    *tc, *f"class add dev cp0 parent 1: classid 1:{number} htb rate {limit}".split()
                )
            mates = range(rank - rank % NODE, rank - rank % NODE + NODE)
            for mate in mates:
                match = f"u32 match ip dst 10.0.0.{mate + 1}/32 flowid 1:10"
                run(*tc, *f"filter add dev cp0 parent 1: protocol ip {match}".split())
        yield made
    finally:
        for each in made:
            with suppress(subprocess.CalledProcessError, OSError):
                run("ip", "netns", "del", each)
                (SHARES / each).rmdir()
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", name)


class Ranks:
    """Processes of one checkout, one in each namespace, that time what they are told."""

    def __init__(self, tree, made, port, tokens):
        self.processes = []
        for rank, each in enumerate(made):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(NODE),
                "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "cp0",
                "PYTHONPATH": str(tree),
            }  # fmt: skip
            words = ["ip", "netns", "exec", each, sys.executable, __file__, str(tokens)]
            self.processes.append(
                subprocess.Popen(
                    words, env=environment, cwd=tree, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip
            with suppress(FileNotFoundError):
                (SHARES / each / "cgroup.procs").write_text(str(self.processes[-1].pid))

    def ask(self, **case):
        for process in self.processes:
            print(json.dumps(case), file=process.stdin, flush=True)
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def end(self):
        for process in self.processes:
            process.communicate()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", type=float, default=2e8, help="bytes a second")
    parser.add_argument("--between", type=float, default=2e7, help="bytes a second")
    asked = parser.parse_args()
    with namespaces(asked.inside, asked.between) as made:
        ours = Ranks(ROOT, made, 29_501, asked.tokens)
        theirs = Ranks(asked.against, made, 29_502, asked.tokens) if asked.against else None
        groups = list(filter(None, (ours, theirs)))
        rates = [group.ask(rates=True)[0] for group in groups]
        print(f"{HEADS} heads of {SIZE}, float32; {vars(asked)}, measured {rates}")
        print("mask: median seconds of each shape; the default over the fastest; the other "
              "checkout's default over this one's")  # fmt: skip
        for name in masks(asked.tokens):
            contest = {shape: (ours, keywords) for shape, keywords in SHAPES.items()}
            if theirs:
                contest["other"] = theirs, {}
            chosen = {
                shape: ranks.ask(mask=name, keywords=keywords)[0].get("heads")
                for shape, (ranks, keywords) in contest.items()
            }
            found = {shape: [] for shape in contest}
            for _ in range(asked.rounds):
                for shape, (ranks, keywords) in contest.items():
                    answers = ranks.ask(mask=name, keywords=keywords)
                    found[shape].append(max(answer["seconds"] for answer in answers))
            medians = {shape: statistics.median(times) for shape, times in found.items()}
            least = min(medians[shape] for shape in SHAPES)
            words = [f"{shape} {seconds:.3f}" for shape, seconds in medians.items()]
            words += [
                f"default is heads {chosen['default']}",
                f"default / fastest {medians['default'] / least:.2f}",
            ]
            if theirs:
                words += [f"other / default {medians['other'] / medians['default']:.2f}"]
            print(f"{name}: {'; '.join(words)}", flush=True)
        for group in groups:
            group.end()


def rank(n):
    """One rank: it answers each line of its input by a line."""
    import torch
    import torch.distributed as dist

    import cp_ring
    from cp_ring.plan import Layout
    from cp_ring.plan.sizes.device_rates import RATES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = dist.get_rank()
    with suppress(ImportError):  # another checkout may have none of them
        from functools import partial

        from cp_ring.plan import balance, routes
        from cp_ring.plan.time import Conditions

        layer = {"heads": HEADS, "kv_heads": HEADS, "head_dim": SIZE, "dtype": "fp32"}
        for name, value in layer.items():
            object.__setattr__(Conditions().sizes, name, value)
        balance.Conditions = routes.Conditions = partial(Conditions, node=NODE)

    known = masks(n)
    kept = {}

    def prepared(mask, keywords):
        """A function that attends and differentiates, and how many ranks exchange heads."""
        key = mask, str(keywords)
        if key not in kept:
            more, made = dict(keywords), known[mask]
            name = more.pop("layout", "balanced")
            layout = getattr(Layout, name)(made if name == "balanced" else made.n, RANKS)
            torch.manual_seed(number)
            q, k, v, dout = (
                torch.randn(1, layout.tokens_per_rank[number], HEADS, SIZE, requires_grad=grad)
                for grad in (True, True, True, False)
            )

            def call():
                out = cp_ring.ring_attention(
                    q, k, v, dist.group.WORLD, mask=made, layout=layout, **more
                )
                torch.autograd.grad(out, (q, k, v), dout)

            kept[key] = call
        return kept[key]

    for line in sys.stdin:
        case = json.loads(line)
        dist.barrier()
        if "rates" in case:
            q = torch.randn(1, n // RANKS, HEADS, SIZE)
            cp_ring.ring_attention(q, q, q, cp_ring.ALONE)
            dist.barrier()
            start = perf_counter()
            for _ in range(4):
                cp_ring.ring_attention(q, q, q, cp_ring.ALONE)
            flops = 16 * HEADS * (n // RANKS) ** 2 * SIZE / (perf_counter() - start)
            rates = [flops]
            sent, got = torch.empty(2, 1_000_000, dtype=torch.uint8)
            for mate in (number ^ 1, number ^ NODE):
                dist.barrier()
                start = perf_counter()
                moves = dist.P2POp(dist.isend, sent, mate), dist.P2POp(dist.irecv, got, mate)
                for work in dist.batch_isend_irecv(list(moves)):
                    work.wait()
                rates.append(len(sent) / (perf_counter() - start))
            least = torch.tensor(rates)
            dist.all_reduce(least, dist.ReduceOp.MIN)
            found = dict(zip(("forward", "inside", "between"), least.tolist(), strict=True))
            for name, rate in {
                **found,
                "backward": least.tolist()[0],
                "call": 1e-3,
                "processors": 1,
            }.items():
                object.__setattr__(RATES, name, rate)
            print(json.dumps(found), flush=True)
            continue
        call = prepared(case["mask"], case["keywords"])
        dist.barrier()
        start = perf_counter()
        call()
        dist.barrier()
        answer = {"seconds": perf_counter() - start}
        with suppress(Exception):  # another checkout may keep its plans elsewhere
            plans, wanted = sys.modules["cp_ring.plan.plan"]._plans, known[case["mask"]].digest
            answer["heads"] = [x for x in plans.values() if x.mask.digest == wanted][-1].ulysses
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "".join(sys.argv[1:]).isdecimal():
        sys.path.pop(0)  # this folder
        rank(int(sys.argv[1]))
    else:
        main()
