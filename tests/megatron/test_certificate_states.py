"""What the certificate leaves as it was, and its process group of one rank."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from cp_ring.megatron.certificate import states, tiny_model


def test_the_group_of_a_rank_is_made_by_itself(monkeypatch):
    """Of a job whose group is bound to a device, torch would split the NCCL communicator, which
    takes all ranks of the job.
    """
    device = torch.device("cuda", 0)
    job, bound = SimpleNamespace(bound_device_id=device), []
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: job)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        dist, "new_group", lambda *args, **options: bound.append(job.bound_device_id)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    with tiny_model.group_of_this_rank():
        pass
    assert bound == [None]
    assert job.bound_device_id == device


def test_generators_of_the_tracker_are_restored():
    """With CUDA graphs, Megatron's tracker holds generators, which go on in place, and no tensors."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = tracker.get_states()
    try:
        tracker.set_states({"model": torch.Generator().manual_seed(5)})
        wanted = torch.rand(3, generator=torch.Generator().manual_seed(5))
        with states.states_restored():
            torch.rand(2, generator=tracker.get_states()["model"])
        assert torch.equal(torch.rand(3, generator=tracker.get_states()["model"]), wanted)
    finally:
        tracker.set_states(before)
