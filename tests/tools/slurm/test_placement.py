"""Where ranks run, and which hops of the plan pass between nodes."""

import dataclasses

import numpy as np
import pytest

from cp_ring.errors import ConfigError
from cp_ring.plan.costs.cost import between_nodes
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.schedule import relay_schedule
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.job import job_config as config
from cp_ring.tools.slurm.attention_plan import describe_job, plan_of, sizes_of
from cp_ring.tools.slurm.placement import (
    Placement,
    context_groups,
    describe,
    traffic,
)


def plan(cp, n=64, route="direct", mask=None):
    return Plan.build(mask or Mask.causal(n), Layout.zigzag(n, cp), route, "ring")


def test_groups_are_those_of_megatron():
    assert context_groups(1, 4, 4).tolist() == [[0, 1, 2, 3]]
    assert context_groups(2, 2, 8).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(ConfigError, match="tensor 2 x context 4"):
        context_groups(2, 4, 12)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (2, 2, 1, 2), (2, 2, 2, 2)])
def test_groups_against_megatrons_rank_generator(sizes):
    from megatron.core.parallel_state import RankGenerator

    tp, cp, dp, pp = sizes
    ours = {tuple(group) for group in context_groups(tp, cp, tp * cp * dp * pp).tolist()}
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order).get_ranks("cp")
        assert {tuple(group) for group in theirs} == ours


@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize(("cp", "per_node"), [(4, 1), (4, 2), (8, 2), (8, 4), (4, 4)])
def test_bytes_are_those_of_the_transfers_one_by_one(cp, per_node, route):
    made = plan(cp, route=route, mask=Mask.causal(64, window=(20, 0)))
    placement = Placement(tuple(f"n{i}" for i in range(2 * cp // per_node)), per_node)
    groups = context_groups(1, cp, 2 * cp)
    found = {hop.hop: hop for hop in traffic(made.ring, groups, placement, 10)}
    expected = {}
    for group in groups:
        moves = made.ring.transfers
        for hop, sender, receiver, tokens in zip(
            moves.hop, moves.sender, moves.receiver, moves.tokens, strict=True
        ):
            source, target = placement.host(group[sender]), placement.host(group[receiver])
            cell = expected.setdefault(int(hop), {"inside": 0, "between": 0, "out": {}, "into": {}})
            cell["inside" if source == target else "between"] += int(tokens) * 10
            if source != target:
                cell["out"][source] = cell["out"].get(source, 0) + int(tokens) * 10
                cell["into"][target] = cell["into"].get(target, 0) + int(tokens) * 10
    assert found.keys() == expected.keys()
    for hop, cell in expected.items():
        assert (found[hop].inside, found[hop].between) == (cell["inside"], cell["between"])
        for name in ("out", "into"):
            table = getattr(found[hop], name)
            assert {
                host: int(table[i]) for i, host in enumerate(placement.hosts) if table[i]
            } == cell[name]
    total = sum(hop.inside + hop.between for hop in found.values())
    assert sum(hop.between for hop in found.values()) / total == pytest.approx(
        between_nodes(made.ring, per_node)
    )


def test_order_of_hosts_decides_what_passes_between_nodes():
    made, groups = plan(4), context_groups(1, 4, 4)
    shared = traffic(made.ring, groups, Placement(("a", "b"), 2), 8)
    apart = traffic(made.ring, groups, Placement(("a", "b", "c", "d"), 1), 8)
    assert sum(hop.between for hop in shared) < sum(hop.between for hop in apart)
    assert all(hop.inside == 0 for hop in apart)


def test_lines_name_the_hops():
    made, groups, placement = plan(4), context_groups(1, 4, 8), Placement(("a", "b", "c", "d"), 2)
    lines = describe(placement, groups, traffic(made.ring, groups, placement, 2**20))
    assert (
        lines[0] == "each of 2 context-parallel groups of 4 is on 2 of 4 nodes"
        and lines[1] == "the first on a a b b"
    )
    assert [line.split(":")[0] for line in lines[2:]] == ["hop 1", "hop 2", "hop 3"]
    alone = Placement(("a", "b"), 4)
    assert (
        describe(alone, groups, traffic(made.ring, groups, alone, 1))[-1]
        == "no hop passes between nodes"
    )


def test_hosts_are_named_once():
    with pytest.raises(ConfigError, match="names n1 twice"):
        Placement(("n1", "n1"), 2)


def test_nodes_and_bytes():
    assert np.array_equal(Placement(("a", "b"), 2).nodes, [0, 0, 1, 1])
    assert (
        AttentionSizes(heads=8, kv_heads=2, head_dim=64, dtype="bf16").on_wire()[0]
        == 2 * 2 * 64 * 2
    )
    with pytest.raises(ConfigError):
        Placement((), 2)


HEADS = {"num_attention_heads": 8, "hidden_size": 256, "bf16": True}
LATENT = {"multi_latent_attention": True}


@pytest.mark.parametrize(
    ("megatron", "tp", "elements"),
    [
        ({}, 1, 8 * (32 + 32)),
        ({"group_query_attention": True, "num_query_groups": 2}, 2, 1 * (32 + 32)),
        ({"kv_channels": 48}, 1, 8 * (48 + 48)),
        (LATENT, 1, 8 * (128 + 64 + 128)),
        (
            LATENT
            | {
                "qk_head_dim": 16,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 20,
                "micro_batch_size": 3,
            },
            2,
            3 * 4 * (16 + 8 + 20),
        ),
        (
            LATENT | {"kv_channels": 48, "group_query_attention": True, "num_query_groups": 2},
            1,
            8 * (128 + 64 + 128),
        ),
    ],
)
def test_token_bytes_of_a_job_are_those_of_its_keys_and_values(megatron, tp, elements):
    job = config.validate(
        {"megatron": HEADS | megatron, "parallel": {"tensor_model_parallel_size": tp}}, "job"
    )
    assert sizes_of(job).on_wire()[0] == elements * 2


def test_plan_of_a_job_goes_by_its_flags_and_nodes():
    def plan(per_node, tp=1, megatron=None, **cp_ring):
        parallel = {"context_parallel_size": 8, "tensor_model_parallel_size": tp}
        given = {
            "megatron": HEADS | {"seq_length": 1024} | (megatron or {}),
            "parallel": parallel,
            "cp_ring": cp_ring,
        }
        return plan_of(config.validate(given, "job"), per_node)

    assert (
        plan(4).ring.node_size == 4
        and plan(4, tp=2).ring.node_size == 2
        and plan(4, node_size=8).ring.node_size == 8
    )
    assert plan(4, route="relay").schedule == relay_schedule("auto", 8, 4)
    assert plan(4, heads=2).ulysses == 2 and plan(4, heads=2).ring.node_size == 2
    assert plan(4, megatron={"cp_comm_type": "a2a"}).ring.cp == 1
    assert (
        plan(
            4,
            megatron={
                "cp_comm_type": ["a2a+p2p", "p2p"],
                "hierarchical_context_parallel_sizes": [4, 2],
            },
        ).ulysses
        == 4
    )
    assert plan(4, route="auto", heads="auto").cp == 8
    given = {
        "megatron": HEADS | {"seq_length": 1024},
        "parallel": {"context_parallel_size": 8},
        "cp_ring": {"heads": 4},
    }
    lines = describe_job(config.validate(given, "job"), Placement(("a", "b"), 4))
    assert lines[0] == "4 neighboring ranks exchange heads, inside a node; the ring has 2 members"
    assert any("hop 1:" in line and "pass between nodes" in line for line in lines)


def test_widths_of_multi_latent_attention_default_to_megatrons():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    theirs = {field.name: field.default for field in dataclasses.fields(MLATransformerConfig)}
    sizes = sizes_of(config.validate({"megatron": HEADS | LATENT}, "job"))
    assert (sizes.head_dim, sizes.value_dim) == (
        theirs["qk_head_dim"] + theirs["qk_pos_emb_head_dim"],
        theirs["v_head_dim"],
    )
