"""Mamba and gated delta net layers: documents begin with a new state, and tokens are in order under
every layout.

The CUDA kernels of mamba_ssm and fla have stand-ins in torch (tests/parity/recurrent.py).
"""

import itertools

import numpy as np
import pytest
import torch

from cp_ring import Mask
from cp_ring.errors import ConfigError
from tests.megatron import recurrent_layers


@pytest.fixture(scope="module")
def kernels():
    """Imports Megatron when the first test runs."""
    from cp_ring.patches.cpu_runtime import functions_uncompiled

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
    torch.testing.assert_close(ours, theirs)
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
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["mamba", "delta_net"])
def test_a_layer_with_documents_is_the_layer_on_each_document_alone(
    one_rank, applied, kernels, kind
):
    from cp_ring.megatron.adapter.documents import DocumentParams, Documents

    applied("recurrent_layers")
    offsets = recurrent_layers.OFFSETS
    layer, hidden = recurrent_layers.build(kind), recurrent_layers.whole_rows()
    packed = DocumentParams.carry(Documents.in_rows(offsets, 2, "zigzag", 1))
    ours = recurrent_layers.call(layer, hidden, packed).transpose(0, 1).reshape(128, -1)
    stream = hidden.transpose(0, 1).reshape(128, 1, -1)
    alone = [
        recurrent_layers.call(layer, stream[a:b], None) for a, b in itertools.pairwise(offsets)
    ]
    torch.testing.assert_close(ours, torch.cat(alone).squeeze(1), rtol=1e-4, atol=1e-6)


def test_a_mask_with_branches_is_rejected_by_name(monkeypatch):
    from cp_ring.megatron.adapter import recurrent
    from cp_ring.megatron.data.masks import DeclaredMask

    for mask in (Mask.tree([-1, 0, 0], [20, 30, 14], 64), Mask.shared_prefix([(20, [30, 14])])):
        carried = DeclaredMask.of_rows([mask], "zigzag", 1)
        with pytest.raises(
            ConfigError, match=r"branch at token 20, .* position 20, but the state of"
        ):
            recurrent.order_of(carried, torch.device("cpu"))


def test_padding_and_declared_documents_begin_anew_too():
    from cp_ring.megatron.adapter import recurrent
    from cp_ring.megatron.adapter.documents import Documents
    from cp_ring.megatron.data.masks import DeclaredMask
    from cp_ring.plan.layout import Layout

    def numbers(carried):
        return recurrent.order_of(carried, torch.device("cpu")).documents.tolist()

    padded = Documents(np.array([0, 4]), np.array([3, 6]), Layout.zigzag(8, 2))
    assert numbers(padded) == [[0, 0, 0, 1, 2, 2, 3, 3]]
    masks = [Mask.documents([0, 3, 8]), Mask.causal(8)]
    assert numbers(DeclaredMask.of_rows(masks, "zigzag", 2)) == [[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
