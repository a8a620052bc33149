"""What the certificate judges by: drawn microbatches, weights of the loss, and the worst rank."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cp_ring.megatron import settings
from cp_ring.megatron.certificate import batch
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.dense_oracle import document_rule
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.options import Options


def test_layers_get_the_offsets_of_documents_on_their_device(monkeypatch):
    monkeypatch.setattr(batch, "thd_params", lambda *offsets: offsets)
    monkeypatch.setattr(batch, "own_device", lambda: torch.device("meta"))
    monkeypatch.setattr(
        batch, "documents_of", lambda *_: batch.Documents.in_rows(np.array([0, 16]), 1, 2)
    )
    drawn = Batch.draw("packed", 1, 16, 2)
    assert all(offsets.is_meta for offsets in drawn.packed)
    assert not drawn.delivered(1)["cu_seqlens"].is_meta


@pytest.mark.parametrize("mask", ["causal", "documents", "packed", "declared tree"])
def test_a_drawn_microbatch_is_what_it_declares(mask):
    """Two ranks hold each token once, and no token is another's label."""
    with settings.in_force(Options.make(mask_kinds="tree" if " " in mask else "")):
        drawn = Batch.draw(mask, 2, 128, 2)
        item = drawn.delivered(1)
    rows = 1 if mask == "packed" else 2
    assert drawn.shape == item["tokens"].shape == (rows, 128) and len(drawn.rules) == rows
    assert torch.equal(item["tokens"][:, 1:], item["labels"][:, :-1])
    assert item["tokens"].unique().numel() == rows * 128
    places = torch.cat([*map(drawn.split.places, range(2))])
    assert places.T.sort().values.tolist() == [[*range(128)]] * rows
    for rule, ids in zip(drawn.rules, item["position_ids"], strict=True):
        assert torch.equal(rule.positions, ids)
        assert (len(rule.pieces) > 1) == (mask != "causal")


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
    split = SimpleNamespace(layout=SimpleNamespace(cp=2), places=lambda rank: ranks[rank].T)
    for kind in ("causal", "packed"):
        rules = [document_rule(25, [(0, 9), (9, 25)])]
        weights = Batch(kind, [], (1, 25), rules, None, split)._factors(3)
        assert weights.gt(0).sum() > 9 and weights.unique().numel() > 4
        for mine in ranks:
            assert weights.gather(1, mine).sum() % 1 == 0
