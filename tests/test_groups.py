"""The context-parallel group outside Megatron."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from cp_ring.comm.groups import build_mesh, context_parallel_group
from cp_ring.errors import ConfigError


def _members(group, **sizes):
    mesh = build_mesh(**sizes, device_type="cpu")
    return dist.get_process_group_ranks(context_parallel_group(mesh)), mesh.size(1)


@pytest.mark.parametrize(
    ("sizes", "ring"),
    [
        ({"cp": 4}, [[0, 1, 2, 3]] * 4),
        ({"cp": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ({"cp": 2, "tp": 2}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ({"cp": 2, "pp": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_ring_beside_the_other_groups(pool, sizes, ring):
    members = pool.run(_members, 4, **sizes)
    assert [ranks for ranks, _ in members] == ring
    assert {dp for _, dp in members} == {4 // (sizes["cp"] * sizes.get("tp", 1) * sizes.get("pp", 1))}


def _refusal(group, **sizes):
    with pytest.raises(ConfigError) as caught:
        build_mesh(**sizes, device_type="cpu")
    return str(caught.value)


def test_sizes_that_do_not_multiply_to_the_world(pool):
    assert pool.run(_refusal, 4, cp=3) == ["cp 3 x tp 1 x pp 1 is 3, which does not divide the world of 4 ranks"] * 4
    assert pool.run(_refusal, 4, cp=2, dp=3) == ["cp 2 x tp 1 x pp 1 x dp 3 is 6, but the world has 4 ranks"] * 4
    assert pool.run(_refusal, 4, cp=0) == ["cp size 0 must be at least 1"] * 4
