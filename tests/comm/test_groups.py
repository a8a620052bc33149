"""Process groups that are made and destroyed leave nothing behind: programs that run long make
many.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, threading
import torch, torch.distributed as dist
from cp_ring import ring_attention, roll

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
x = torch.randn(1, 16, 2, 8, requires_grad=True)

def used():
    group = dist.new_group([0])
    ring_attention(x, x, x, group, causal=True).sum().backward()
    roll(torch.ones(1, 16), -1, None, group)
    dist.destroy_process_group(group)

def held():
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "cp_ring agreement":
            thread.join()
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

used()
before = held()
for _ in range(10):
    used()
print(before, held())
"""


@pytest.mark.ci
def test_destroyed_groups_leave_no_threads_and_no_files():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().split(") (")
    assert before.strip("()") == after.strip("()"), done.stdout
