"""The kinds of layers that the certificate finds in flags, and the layers of its tiny model: the
first ones, which show each kind.
"""

from argparse import Namespace
from dataclasses import make_dataclass

import pytest
from megatron.core import transformer
from megatron.core.transformer import TransformerConfig

from cp_ring.megatron.certificate import tiny_model
from cp_ring.megatron.certificate.layer_kinds import find_layer_kinds
from cp_ring.megatron.flags.layer_pattern import (
    attention_layers,
    letters_of,
    main_layers,
    predicting_layers,
)


def flags(pattern, **more):
    values = {
        "hybrid_layer_pattern": pattern, "num_layers": len(main_layers(pattern)), "window_size": None,
        "spec": None,
        "cp_comm_type": None, "tensor_model_parallel_size": 1, "context_parallel_size": 2,
        "micro_batch_size": 1,
        "mamba_num_groups": 4,
    }  # fmt: skip
    return Namespace(**values | more)


def configuration(**more):
    values = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    return TransformerConfig(**values | more)


@pytest.mark.parametrize(
    "pattern, tiny",
    [("*-*-*-", "*-"), ("E*-E|*-/*-*", "E*-/*-*"), ("--E*-E", "--E*"), ("*", "*"), ("**/M-*", "**/M-*")],
)  # fmt: skip
def test_a_tiny_pattern_has_each_kind_of_layer(pattern, tiny):
    args, config = flags(pattern), configuration()
    kinds = find_layer_kinds(args, config)
    count = tiny_model.number_of_layers(args, config, kinds)
    assert tiny_model.tiny_pattern(args, count) == {"hybrid_layer_pattern": tiny}


@pytest.mark.parametrize(
    "every, letters, count", [(4, "GGG*GGG*", 4), ([0, 1, 1, 1, 0, 1, 1, 1], "*GGG*GGG", 3)]
)
def test_linear_attention_of_a_gpt_model(every, letters, count):
    """Each kind of attention with each kind of MLP: experts are in every second layer."""
    args = flags(
        "", num_layers=8, num_experts=8, moe_layer_freq=2, mtp_num_layers=2,
        experimental_attention_variant="gated_delta_net", linear_attention_freq=every,
    )  # fmt: skip
    assert letters_of(args) == letters
    assert attention_layers(args) == [n for n, letter in enumerate(letters, 1) if letter == "*"]
    assert predicting_layers(args) == ([1, 2] if letters[-1] == "*" else [])
    kinds = find_layer_kinds(args, configuration())
    assert tiny_model.number_of_layers(args, configuration(), kinds) == count


@pytest.mark.parametrize(
    "more, count",
    [
        ({}, 1),
        ({"mtp_num_layers": 2}, 2),
        ({"num_experts": 8, "moe_layer_freq": [0, 0, 0, 1, 1, 1]}, 4),
        ({"cp_comm_type": ["p2p", "p2p", "a2a", "p2p", "p2p", "p2p"]}, 3),
    ],
)
def test_the_first_layers_of_a_gpt_model_show_each_kind(more, count):
    args, config = flags("", num_layers=6, **more), configuration()
    config.cp_comm_type = more.get("cp_comm_type")
    assert tiny_model.number_of_layers(args, config, find_layer_kinds(args, config)) == count


def test_a_tiny_model_keeps_what_the_forward_step_reads(monkeypatch):
    """The branch dev of Megatron has a setting of data sets in its configuration too."""
    name = "create_attention_mask_in_dataloader"
    made = make_dataclass("Config", [(name, bool, True)], bases=(TransformerConfig,))
    monkeypatch.setattr(transformer, "TransformerConfig", made)
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    args = flags("", seq_length=64, **sizes | {name: False})
    config = made(**sizes, **{name: False})
    tiny, _ = tiny_model.tiny_args(args, config, find_layer_kinds(args, config))
    assert tiny.hidden_size == 64 and not vars(tiny)[name]


def test_what_no_tiny_model_has_is_named():
    args = flags("", moe_expert_capacity_factor=0.5, moe_router_load_balancing_type="sinkhorn")
    config = configuration(cpu_offloading=True, expert_model_parallel_size=2, num_moe_experts=2)
    config.cuda_graph_impl = "local"
    assert tiny_model.uncovered_layers(args, config) == [
        "the capacity of experts (which Megatron defines by the tokens of a rank)",
        "Sinkhorn routing (which Megatron defines by the tokens of a rank)",
        "experts of other ranks",
        "CUDA graphs",
        "activations in host memory",
    ]


def job(**config):
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    config = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 64} | config
    return flags("", num_layers=4, **sizes), configuration(**config)


def test_each_distinct_kind_once():
    found = find_layer_kinds(*job(window_size=(128, 0), window_attn_skip_freq=2))
    assert [(kind.layer, kind.numbers, kind.window) for kind in found] == [
        (1, (1, 3), (128, 0)), (2, (2, 4), (-1, -1)),
    ]  # fmt: skip
    assert all((kind.heads, kind.groups, kind.d, kind.scale) == (4, 2, 64, 0.125) for kind in found)


def test_a_probe_shows_the_edge_of_its_window():
    (near,) = find_layer_kinds(*job(window_size=(500, 0)))
    assert near.window == (500, 0) and near.tokens > 2 * 500 and near.tokens % (2 * 4 * 16) == 0
    (far,) = find_layer_kinds(*job(window_size=(100_000, 0)))
    assert far.tokens**2 * far.heads <= 4 << 24
    assert far.layer_name == "layer 1 (window 100000)"
