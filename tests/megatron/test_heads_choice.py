"""`--cp-ring-heads auto`: where a group spans nodes, the formula chooses for each microbatch."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cp_ring.comm import groups
from cp_ring.megatron import enable
from cp_ring.megatron.adapter import heads_choice, planned
from cp_ring.megatron.adapter.config import RingConfig, Split
from cp_ring.megatron.adapter.documents import Documents
from cp_ring.megatron.adapter.heads_choice import every_choice, with_choice
from cp_ring.megatron.flags.resolve import _with_named_type
from cp_ring.megatron.options import Options
from cp_ring.patches.install import install
from cp_ring.patches.patch import Patch
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.sizes.device_rates import NAMED, RATES, running, use
from cp_ring.plan.time import Conditions
from tests.megatron.layers import core_attention

MODEL = SimpleNamespace(
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=16,
    bf16=True,
    fp16=False,
    multi_latent_attention=False,
)


def choice(kind="p2p", model=MODEL, near=2, **settings):
    return with_choice(PlanSpec(), kind, Options.make(**settings), model, 1, 4, near)


def test_a_group_of_two_nodes_has_a_choice():
    spec = choice()
    assert spec.choice is not None and spec.choice.node == 2
    assert (spec.choice.sizes.heads, spec.choice.sizes.kv_heads) == (8, 4)
    assert [each.ulysses for each in every_choice(spec, 4)] == [1, 2, 4]
    assert [each.choice for each in every_choice(spec, 4)] == [None] * 3
    assert choice(None).choice == spec.choice  # a configuration that names no type


@pytest.mark.parametrize(
    "named",
    [
        {"heads": 1},
        {"heads": 2},
        {"kind": "a2a"},
        {"kind": "all_gather"},
        {"schedule": "0,1,2,2"},
        {"model": SimpleNamespace(**vars(MODEL) | {"multi_latent_attention": True})},
    ],
)
def test_what_is_named_is_not_chosen(named):
    assert choice(**named).choice is None and every_choice(choice(**named), 4) == [choice(**named)]


def test_a_layer_chooses_by_the_gpu_that_runs_it(one_rank, monkeypatch):
    monkeypatch.setattr(planned, "choose_for", lambda device: use("NVIDIA B200"))
    core_attention()
    assert choice().choice.rates == running() == NAMED["b200"]


@pytest.mark.parametrize("door", [lambda: install(["--cp-ring", "--cp-ring-cpu"]), enable])
def test_a_rank_without_attention_layers_chooses_by_its_gpu_too(door, monkeypatch):
    """As one that has the embeddings alone: it splits batches."""
    monkeypatch.setattr(groups, "choose_for", lambda device: use("NVIDIA B200"))
    monkeypatch.setattr(Patch, "apply", lambda _: None)
    door()
    assert running() == NAMED["b200"]


def test_inside_a_node_there_is_no_choice():
    assert choice(near=4).choice is choice(near=1).choice is None


def test_a_layer_counts_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setattr(planned, "ranks_per_node", lambda: 2)
    monkeypatch.setattr(planned.dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    alone, four = (SimpleNamespace(size=lambda ranks=ranks: ranks) for ranks in (1, 4))
    layer = SimpleNamespace(cp_comm_type=None, tp_group=alone, ring=RingConfig(), config=MODEL)
    assert planned.PlannedAttention._spec_on(layer, four).choice == choice().choice
    assert planned.PlannedAttention._spec_on(layer, alone).choice is None


def test_each_microbatch_has_its_own(monkeypatch):
    """A document that spans all ranks wants all to exchange heads; documents of a rank each send
    nothing.
    """
    rates = replace(RATES, forward=1e15, backward=1e15, inside=1e10, between=1e9, call=1e-9)
    monkeypatch.setattr(heads_choice, "Conditions", partial(Conditions, rates=rates))
    found = []
    for offsets in ([0, 4096], [0, 1024, 2048, 3072, 4096]):
        documents = Documents.in_rows(np.array(offsets), 1, 4, Split("contiguous"))
        plans = [documents.rank_plan(rank, spec=choice()) for rank in range(4)]
        assert len({each.ulysses for each in plans}) == 1
        assert len({each.digest for each in plans}) == 1
        found.append(plans[0].ulysses)
    assert found == [4, 1]


@pytest.mark.parametrize(
    "argv, heads",
    [
        ([], "auto"),
        (["--cp-comm-type", "p2p"], 1),
        (["--cp-comm-type=p2p"], 1),
        (["--cp-comm-type", "p2p", "--cp-ring-heads", "auto"], "auto"),
    ],
)
def test_a_type_that_is_named_is_that_of_megatron(argv, heads):
    args = Namespace(cp_ring_heads="auto")
    assert _with_named_type(args, Options.make(), argv).heads == heads == args.cp_ring_heads
