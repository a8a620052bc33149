"""The process groups of the probes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from cp_ring.megatron.certificate import isolation


def test_groups_of_probes_are_made_by_their_members(monkeypatch):
    """Of a job whose group is bound to a device, torch would split the NCCL communicator, which takes all ranks of the job."""
    device = torch.device("cuda", 0)
    job, bound = SimpleNamespace(bound_device_id=device), []
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: job)
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: bound.append(job.bound_device_id))
    isolation._new_group("nccl", (0, 1), 3)
    assert bound == [None]
    assert job.bound_device_id == device
