"""Mamba and gated delta net layers: documents begin with a new state, and tokens are in order under
every layout.

The CUDA kernels of mamba_ssm and fla have stand-ins in torch (tests/parity/recurrent.py).
"""

import itertools
from argparse import Namespace
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from cp_ring import Layout, Mask, Options
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.recurrent_choice import choose, mixers, rejection
from cp_ring.recurrent.pieces import Pieces
from tests.megatron import recurrent_layers
from tests.megatron.layers import configuration
from tests.recurrent.test_states import sent


@pytest.fixture(scope="module")
def kernels():
    """Imports Megatron when the first test runs."""
    from cp_ring.megatron.compat import functions_uncompiled

    with functions_uncompiled():
        from tests.parity import recurrent
    return recurrent


def draw(*shape):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def test_the_delta_rule_is_megatrons_own_in_torch(kernels):
    if not hasattr(kernels.gated_delta_net, "tensor_a2a_cp2hp"):
        pytest.skip("this version's takes other arguments")
    q, k, v, beta = (
        draw(2, 70, 2, 4),
        draw(2, 70, 2, 4),
        draw(2, 70, 2, 6),
        draw(2, 70, 2).sigmoid(),
    )
    q, k, v, beta, g = (x.float() for x in (q, kernels.l2norm(k), v, beta, -draw(2, 70, 2).exp()))
    ours, _ = kernels.delta_rule(q, k, v, g=g, beta=beta)
    theirs, _ = kernels.gated_delta_net.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    assert_close(ours, theirs)
    if not hasattr(kernels.gated_delta_net, "torch_chunk_gdn2"):  # since 0.20
        return
    by_channel = {
        "g": -draw(2, 70, 2, 4).exp(),
        "b": draw(2, 70, 2, 4).sigmoid(),
        "w": draw(2, 70, 2, 6).sigmoid(),
    }
    by_channel = {name: x.float() for name, x in by_channel.items()}
    ours, _ = kernels.delta_rule(q, k, v, **by_channel)
    theirs, _ = kernels.gated_delta_net.torch_chunk_gdn2(q, k, v, **by_channel)
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["mamba", "delta_net", "deterministic"])
def test_a_layer_with_documents_is_the_layer_on_each_document_alone(
    one_rank, applied, kernels, kind, monkeypatch
):
    from cp_ring.megatron.adapter.documents import DocumentParams, Documents

    applied("recurrent_layers")
    if kind == "deterministic":  # Megatron's own function of torch, without documents
        monkeypatch.setattr(recurrent_layers, "DETERMINISTIC", True)
    offsets = recurrent_layers.OFFSETS
    layer, hidden = recurrent_layers.build(kind), recurrent_layers.whole_rows()
    packed = DocumentParams.carry(Documents.in_rows(offsets, 2, 1))
    ours = recurrent_layers.call(layer, hidden, packed).transpose(0, 1).reshape(128, -1)
    stream = hidden.transpose(0, 1).reshape(128, 1, -1)
    alone = [
        recurrent_layers.call(layer, stream[a:b], None) for a, b in itertools.pairwise(offsets)
    ]
    assert_close(ours, torch.cat(alone).squeeze(1), rtol=1e-4, atol=1e-6)


def test_states_restart_at_documents_and_padding_and_fork_at_branches():
    from cp_ring.megatron.adapter.documents import Documents, thd_params
    from cp_ring.megatron.data.masks import DeclaredMask

    def starts(carried):
        return [x.tolist() for x in carried.starts()]

    padded = Documents.in_thd(thd_params(torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])), 4, 2)
    assert starts(padded) == [[0, 3, 4, 6], [-1] * 4]
    masks = [Mask.documents([0, 3, 8]), Mask.causal(8)]
    assert starts(DeclaredMask.of_rows(masks, 2)) == [[0, 3, 8], [-1] * 3]
    masks = [Mask.tree([-1, 0, 1, 0, -1], [3, 2, 4, 2, 1], 16), Mask.shared_prefix([(4, [4, 8])])]
    assert starts(DeclaredMask.of_rows(masks, 2)) == [
        [0, 3, 5, 9, 11, 12, 16, 20, 24], [-1, 2, 4, 2, -1, -1, -1, 19, 19]
    ]  # fmt: skip


def test_an_evaluation_in_inference_mode_leaves_indices_for_training():
    from cp_ring.megatron.adapter.recurrent import _tokens

    group = mock.Mock(**{"size.return_value": 2, "rank.return_value": 0})
    layer = mock.Mock(cp_ring_group=group, **{"pg_collection.cp": group})
    x = torch.randn(4, 1, 3)
    with torch.inference_mode():
        before = _tokens(layer, x, None, 4)
    assert not (before.by_rank.is_inference() or before.in_sequence.is_inference())


def test_each_model_of_a_program_settles_its_way():
    """`auto` takes states where heads do not divide; what a program gives holds for all models."""
    from cp_ring import patches
    from cp_ring.megatron import program, settings

    asked = Asked(Namespace(program=True))
    assert patches.get("recurrent_layers").needed(asked, Options(enabled=True))
    before = settings.current()
    try:
        for given, ways in (("auto", ("heads", "M", "heads")), ("states", ("states",) * 3)):
            settings.configure(Options(enabled=True, recurrent=given))
            program.begin(program.Program(64, recurrent=given))
            for way, (groups, heads) in zip(ways, ((4, 8), (1, 3), (4, 8)), strict=True):
                config = configuration(
                    context_parallel_size=2, is_hybrid_model=True, mamba_head_dim=8,
                    mamba_state_dim=8, mamba_num_groups=groups, mamba_num_heads=heads,
                )  # fmt: skip
                program.accept_model(config)
                assert settings.current().recurrent == way
    finally:
        settings.configure(before)
        program.begin(None)


SIZES = {"context_parallel_size": 8, "seq_length": 131_072, "bf16": True, "hidden_size": 2688}
QWEN_NEXT = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
NANO = {"hybrid_layer_pattern": "M*-", "mamba_num_heads": 64, "mamba_head_dim": 64}


@pytest.mark.parametrize(("model", "share"), [(QWEN_NEXT, 8), (NANO, 20)])
def test_states_are_few_bytes_of_what_an_exchange_of_heads_sends(model, share):
    """Of Qwen3-Next and Nemotron 3 Nano, with the halo of the convolution."""

    asked = Asked(Namespace(num_layers=4, **SIZES, **model))
    ((_, sizes),) = mixers(asked)
    pieces = Pieces.of(Layout.zigzag(131_072, 8), [0], [-1])
    halo = 14 * 3 * sizes.channels * sizes.element
    maps = sum(sent(each.moves) for each in pieces.rounds) * sizes.map_bytes
    assert (maps + halo) * share < 8 * sizes.exchange_bytes(131_072 // 8, 8)
    assert choose(asked) == "states"
    asked = Asked(Namespace(num_layers=4, **{**SIZES, "seq_length": 64}, **model))
    assert choose(asked) == "heads"
    asked = Asked(Namespace(**{**SIZES, "context_parallel_size": 48}, num_layers=4, **model))
    assert choose(asked) == "states"


@pytest.mark.parametrize(
    ("sizes", "way"),
    [({}, "heads"), ({"mamba_num_groups": 4}, "M"), ({"linear_num_key_heads": 4}, "G"),
     ({"mamba_num_groups": 4, "linear_num_key_heads": 4}, "states")],
)  # fmt: skip
def test_kinds_of_layers_take_states_each_where_their_heads_do_not_divide(sizes, way):

    few = {**SIZES, "seq_length": 64, "hybrid_layer_pattern": "M*G-"}
    asked = Asked(Namespace(**few, **sizes))
    assert choose(asked) == way
    asked = Asked(Namespace(**few, mamba_num_groups=4, linear_num_key_heads=4))
    said = rejection(asked, Options.make(recurrent=way)) or ""
    assert ("among 8 ranks: leave out --cp-ring-recurrent " + way in said) is (way != "states")


def test_a_gated_delta_product_has_larger_states_than_mamba():

    product = {"spec": ["a.module", "gated_delta_product_stack_spec"], "gdp_num_householder": 2}
    sizes = [dict(mixers(Asked(Namespace(**SIZES, **NANO, **more))))["M"] for more in ({}, product)]
    assert [each.map_bytes for each in sizes] == [
        64 * (64 * 128 + 1) * 4,
        64 * 128 * (64 + 128) * 4,
    ]
    # the values of two rules, and outputs; keys of both and queries; strengths of both, and decay
    assert sizes[1].channels == 3 * 64 * 64 + 3 * 8 * 128 + 3 * 64
