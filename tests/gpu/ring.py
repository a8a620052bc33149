"""One rank of a ring whose ranks share a device: its out and gradients against float64, to a file.

torchrun --nproc-per-node RANKS -m tests.gpu.ring BACKEND KERNEL FOLDER
"""

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cp_ring import Layout, Mask, Plan
from cp_ring.testing.oracle import Case, brute_force, error
from tests.gpu import over_host
from tests.rings import attend_to_shard

HEADS = {"h": 8, "g": 2, "d": 64, "e": 64}


def main(backend, kernel, folder):
    options = {"device_id": torch.device("cuda", 0)} if backend == "nccl" else {}
    if backend == "gloo":
        over_host.use()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60), **options)
    rank, size, group, n = dist.get_rank(), dist.get_world_size(), dist.group.WORLD, 1024
    masks = {
        "causal": Mask.causal(n),
        "window": Mask.causal(n, window=(200, 0)),
        "documents": Mask.documents([0, 10, 333, 334, 700, 1000, n]),
    }
    found = {}
    for name, mask in masks.items():
        plan = Plan.build(mask, Layout.zigzag(n, size))
        case = Case.draw(n, **HEADS, dtype=torch.bfloat16)
        got = attend_to_shard(group, Case(*(x.cuda() for x in case)), plan, kernel=kernel)
        truth = brute_force(case, mask.dense())
        mine = [plan.layout.shard(x, rank, 1) for x in truth]
        found[name] = [error(x.cpu(), y) for x, y in zip(got, mine, strict=True)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
