"""Process groups that are made and destroyed leave nothing behind: programs that run long make
many.
"""

import json
import subprocess
import sys

import torch
import torch.distributed as dist

from cp_ring.comm.groups import transport_for

PROGRAM = """
import gc, json, os, sys, threading
import torch, torch.distributed as dist
from cp_ring import ring_attention, roll

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
x = torch.randn(1, 16, 2, 8, requires_grad=True)

def used():
    group = dist.new_group(list(range(size)))
    ring_attention(x * (rank + 1), x, x, group, causal=True).sum().backward()
    roll(torch.ones(1, 16), -1, None, group)
    dist.destroy_process_group(group)

def held():
    gc.collect()
    assert threading.active_count() == 1, threading.enumerate()
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]

for _ in range(2):
    used()
before = held()
for _ in range(10):
    used()
print(json.dumps([before, held()]))
"""


def test_destroyed_groups_leave_no_threads_and_no_files(tmp_path, size=2):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for each in ranks:
        out, error = each.communicate()
        assert each.returncode == 0, error
        before, after = json.loads(out)
        # threads of gloo end a moment after their group; what each group leaves is ten of them
        for kept, now in zip(before, after, strict=True):
            assert now < kept + 10, out


def _transport(group, backend):
    transport = transport_for(dist.new_group(backend=backend), torch.device("cpu"))
    return transport.blocks, transport._tags


def test_the_backend_is_that_of_the_tensors(pool):
    """A group may have one for each device, as those of `init_process_group()` do."""
    for backend in ("gloo", "cpu:gloo"):
        assert pool.run(_transport, 4, backend) == [(True, True)] * 4
