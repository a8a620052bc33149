"""Messages through host memory, on the CPU: the same bits as over gloo itself."""

import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.testing.oracle import Case
from tests.gpu.over_host import OverHost
from tests.rings import attend_to_shard

N = 64


def both(group):
    """On a rank: out and gradients over the group, and through host memory."""
    case = Case.draw(N, h=4, g=2)
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, group.size()))
    ways = group, OverHost(group, torch.device("cpu"))
    return [attend_to_shard(way, case, plan) for way in ways]


def test_what_goes_through_the_host_arrives(pool):
    for direct, through in pool.run(both, 4):
        assert all(map(torch.equal, direct, through))
