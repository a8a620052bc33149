"""How many neighboring ranks of a group share a node."""

import pytest

from cp_ring.comm.nodes import node_size, ranks_per_node


@pytest.mark.parametrize(
    "ranks, per_node, size",
    [
        (range(8), 4, 4),
        (range(8), None, 1),
        (range(0, 16, 2), 8, 4),
        (range(0, 64, 8), 8, 1),
        ([0, 1, 2, 4, 5, 6], 4, 3),
        ([0, 1, 2, 4], 4, 1),
        ([0, 4, 1, 5], 4, 1),
        ([], 4, 1),
    ],
)
def test_ranks_of_a_group_on_a_node(ranks, per_node, size):
    assert node_size(list(ranks), per_node) == size


@pytest.mark.parametrize(
    "environment, ranks",
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, None),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, None),
    ],
)
def test_ranks_of_a_node_by_the_launcher(environment, ranks):
    assert ranks_per_node(environment) == ranks
