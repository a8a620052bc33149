"""Mamba and gated delta net layers: documents begin with a new state, and tokens are in order under
every layout.

The CUDA kernels of mamba_ssm and fla have stand-ins in torch (tests/parity/recurrent.py), which are
checked first.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cp_ring import Mask
from cp_ring.errors import ConfigError
from tests.megatron import recurrent_layers

EDGES = [0, 1, 7, 8, 20, 24]
OFFSETS = torch.tensor(EDGES, dtype=torch.int32)
NUMBERS = torch.bucketize(torch.arange(24), OFFSETS.long(), right=True)[None].int()
PIECES = [slice(a, b) for a, b in itertools.pairwise(EDGES)]


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


def scan_inputs():
    heads, inner, state = 4, 16, 4
    width = 2 * inner + 2 * state + heads
    weights = draw(inner + 2 * state, 4), draw(inner + 2 * state), draw(heads), -draw(heads).exp()
    return draw(1, 24, width), weights, {"D": draw(heads), "headdim": 4, "ngroups": 1}


def test_the_scan_is_the_recurrence_of_mamba(kernels):
    x, (weight, bias, dt_bias, a), named = scan_inputs()
    z, xbc, dt = x[0].split([16, 24, 4], -1)
    padded = torch.cat([torch.zeros(3, 24, dtype=torch.float64), xbc])
    xbc = torch.nn.functional.silu(
        torch.stack([(padded[i : i + 4] * weight.T).sum(0) + bias for i in range(24)])
    )
    state, outs = torch.zeros(4, 4, 4, dtype=torch.float64), []
    for i in range(24):
        value, key, query = xbc[i].split([16, 4, 4])
        value, step = value.view(4, 4), torch.nn.functional.softplus(dt[i] + dt_bias)
        state = (
            state * (step * a).exp()[:, None, None] + step[:, None, None] * value[..., None] * key
        )
        outs.append((state @ query + named["D"][:, None] * value).reshape(-1))
    expected = torch.stack(outs) * torch.nn.functional.silu(z)
    torch.testing.assert_close(kernels.scan(x, weight, bias, dt_bias, a, **named)[0], expected)


def test_stand_ins_with_documents_are_each_document_alone(kernels):
    x, weights, named = scan_inputs()
    alone = torch.cat([kernels.scan(x[:, piece], *weights, **named) for piece in PIECES], 1)
    torch.testing.assert_close(kernels.scan(x, *weights, seq_idx=NUMBERS, **named), alone)

    def convolved(x, **more):
        return kernels.causal_conv1d(x=x, weight=draw(6, 4), activation="silu", **more)[0]

    x = draw(1, 24, 6)
    torch.testing.assert_close(
        convolved(x, cu_seqlens=OFFSETS), torch.cat([convolved(x[:, piece]) for piece in PIECES], 1)
    )

    qkv, gates = (
        (draw(1, 24, 2, 4), draw(1, 24, 2, 5)[..., :4], draw(1, 24, 2, 3)),
        (-draw(1, 24, 2).exp(), draw(1, 24, 3)[..., :2]),
    )

    def ruled(piece, **more):
        g, beta = (x[:, piece] for x in gates)
        return kernels.delta_rule(*(x[:, piece] for x in qkv), g=g, beta=beta.sigmoid(), **more)[0]

    alone = torch.cat([ruled(piece) for piece in PIECES], 1)
    torch.testing.assert_close(ruled(slice(None), cu_seqlens=OFFSETS), alone)


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


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs the CPU runtime, which is inert where CUDA is present"
)
@pytest.mark.parametrize("kind", ["mamba", "delta_net"])
def test_a_layer_with_documents_is_the_layer_on_each_document_alone(
    one_rank, applied, kernels, kind
):
    from cp_ring.megatron.data.documents import DocumentParams, Documents

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
    from cp_ring import Mask
    from cp_ring.megatron.adapter import recurrent
    from cp_ring.megatron.data.documents import Documents
    from cp_ring.megatron.data.masks import DeclaredMask
    from cp_ring.plan.layout import Layout

    def numbers(carried):
        return recurrent.order_of(carried, torch.device("cpu")).documents.tolist()

    padded = Documents(np.array([0, 4]), np.array([3, 6]), Layout.zigzag(8, 2))
    assert numbers(padded) == [[0, 0, 0, 1, 2, 2, 3, 3]]
    masks = [Mask.documents([0, 3, 8]), Mask.causal(8)]
    assert numbers(DeclaredMask.of_rows(masks, "zigzag", 2)) == [[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
