"""What the certificate judges by: masks pair by pair, attention by brute force, and the kinds of
layers that flags describe.
"""

import argparse
from types import SimpleNamespace

import torch

from cp_ring.megatron.certificate.attention_probes import ExaminedLayers
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.dense_oracle import document_rule
from cp_ring.megatron.certificate.layer_kinds import find_layer_kinds
from cp_ring.megatron.certificate.report import Certificate, Probe


def job(**config):
    args = argparse.Namespace(
        num_layers=4, tensor_model_parallel_size=2, context_parallel_size=4, micro_batch_size=1
    )
    wanted = {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 64,
        "softmax_type": "vanilla",
    }
    return args, SimpleNamespace(
        **(wanted | {"window_size": None, "window_attn_skip_freq": None} | config)
    )


def test_each_distinct_kind_once_under_each_mask():
    found = find_layer_kinds(
        *job(window_size=(128, 0), window_attn_skip_freq=2), ("causal", "packed")
    )
    assert [(kind.layer, kind.numbers, kind.window, kind.mask) for kind in found] == [
        (1, (1, 3), (128, 0), "causal"), (1, (1, 3), (128, 0), "packed"),
        (2, (2, 4), (-1, -1), "causal"), (2, (2, 4), (-1, -1), "packed"),
    ]  # fmt: skip
    assert all((kind.heads, kind.groups, kind.d, kind.scale) == (4, 2, 64, 0.125) for kind in found)


def test_a_probe_shows_the_edge_of_its_window():
    (near,) = find_layer_kinds(*job(window_size=(500, 0)), ("causal",))
    assert near.probed == (500, 0) and near.tokens > 2 * 500 and near.tokens % (2 * 4 * 16) == 0
    (far,) = find_layer_kinds(*job(window_size=(100_000, 0)), ("causal",))
    assert 0 < far.probed[0] < far.tokens / 2 and far.tokens**2 * far.heads <= 4 << 24
    assert far.layer_name == f"layer 1 (window 100000, probed as {far.probed[0]})"


def test_layers_get_the_offsets_of_documents_on_their_device():
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    given = SimpleNamespace(cu_seqlens_q=offsets, qkv_format="thd")
    for packed in (given, None):
        batch = SimpleNamespace(packed=packed, kind=None)
        meta = torch.device("meta")
        found = ExaminedLayers({}, None, torch.float32, meta, 0, batch).packed
        assert found is None if packed is None else found.cu_seqlens_q.is_meta
    assert given.cu_seqlens_q is offsets  # which the batch of the probe is made from


def test_the_worst_rank_counts_and_nan_is_worst():
    def of(error, where=""):
        return [Probe("out", "layer 1", "causal", error, 1.0, where)]

    certificate = Certificate()
    certificate.merge([of(0.1), of(0.5)])
    assert certificate.probes == of(0.5, "rank 1") and certificate.failures == []
    certificate.merge([of(2.0), of(float("nan")), of(0.5)])
    (failure,) = certificate.failures
    assert failure.error != failure.error


def test_weights_of_the_loss_add_up_to_whole_numbers_on_each_rank_of_any_layout():
    """Of which Megatron's loss functions cut off fractions. Chunks may begin at odd tokens."""
    ranks = [torch.tensor([[*range(7), *range(20, 25)]]), torch.tensor([[*range(7, 20)]])]
    for kind in ("causal", "packed"):
        rules = [document_rule(25, [(0, 9), (9, 25)])]
        batch = Batch(SimpleNamespace(mask=kind), rules, [], None, ranks)
        weights = batch._loss_mask(torch.Generator().manual_seed(3))
        assert weights.gt(0).sum() > 9 and weights.unique().numel() > 4
        for mine in ranks:
            assert weights.gather(1, mine).sum() % 1 == 0
