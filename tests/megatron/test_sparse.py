"""Sparse attention in Megatron's layers: what its configuration accepts, and one line for what the
all-gather alone supports.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core.transformer.experimental_attention_variant.absorbed_mla")

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

from cp_ring.errors import ConfigError
from cp_ring.megatron.layers import sparse
from cp_ring.megatron.settings import configure, current
from cp_ring.options import Options
from cp_ring.patches.core_attention import PATCH


@pytest.fixture
def patched():
    PATCH.apply()
    yield
    PATCH.revert()


def config(**changes):
    values = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "context_parallel_size": 2,
        "experimental_attention_variant": "dsa", "dsa_indexer_topk": 4, "apply_rope_fusion": False, "add_bias_linear": False,
        "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 16, "cp_comm_type": "p2p",
    }  # fmt: skip
    return MLATransformerConfig(**values | changes)


@pytest.mark.parametrize("kinds", ["p2p", "all_gather", ["p2p", "all_gather"]])
def test_megatron_accepts_the_types_that_work(patched, kinds):
    assert config(cp_comm_type=kinds).cp_comm_type == kinds


def test_other_types_are_megatrons_to_reject(patched):
    with pytest.raises(AssertionError, match="allgather only"):
        config(cp_comm_type="a2a")


def test_megatron_alone_knows_all_gather_only():
    with pytest.raises(AssertionError, match="allgather only"):
        config()


class Group:
    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.fixture
def layer(monkeypatch, patched):
    """Makes a layer of two ranks that are not there, without an indexer."""
    monkeypatch.setattr(sparse, "get_process_group_ranks", lambda group: [0, 1])
    before = current()

    def make(kind="p2p", own=None, **changes):
        configure(Options.make(enabled=True, **own or {}))
        made = config(dsa_indexer_topk_freq=2, **changes)
        groups = SimpleNamespace(cp=Group(), tp=Group())
        return sparse.RingSparseAttention(
            made, None, 2, AttnMaskType.causal, "self", k_channels=8, cp_comm_type=kind,
            pg_collection=groups,
        )  # fmt: skip

    yield make
    configure(before)


def test_a_layer_follows_the_rules_of_sparse_attention(layer):
    with pytest.raises(ConfigError, match="does not support --cp-ring-heads 2: leave it out"):
        layer(own={"heads": 2})
    with pytest.raises(ConfigError, match="does not support --cp-comm-type a2a: it is split"):
        layer("a2a")


@pytest.mark.parametrize(("mask", "weight"), [("no_mask", torch.ones(4, 8, 8)), ("causal", None)])
def test_a_call_that_is_not_that_of_latents_is_one_line(layer, mask, weight):
    query, key = torch.zeros(4, 1, 4, 12), torch.zeros(4, 1, 1, 12)
    with pytest.raises(ConfigError, match="needs the causal mask, and latents"):
        layer()(
            query, key, None, None, torch.zeros(4, 1, 64), torch.zeros(4, 1, 8),
            attn_mask_type=AttnMaskType[mask], up_v_weight=weight,
        )  # fmt: skip


def test_with_all_gather_it_is_megatrons_own(layer, monkeypatch):
    monkeypatch.setattr(sparse.DSAttention, "forward", lambda self, *inputs: inputs)
    assert layer("all_gather")("q", "k", None, "mask", "x", "qr")[:5] == (
        "q",
        "k",
        None,
        "mask",
        "x",
    )


def test_padding_of_packed_documents_is_theirs_as_in_megatron():
    packed = SimpleNamespace(cu_seqlens_q=[0, 3, 7], cu_seqlens_kv=[0, 3, 7],
                             cu_seqlens_q_padded=[0, 4, 8], cu_seqlens_kv_padded=None)  # fmt: skip
    found = sparse._with_padding(packed)
    assert (found.cu_seqlens_q, found.cu_seqlens_kv) == ([0, 4, 8], [0, 3, 7])
    assert packed.cu_seqlens_q == [0, 3, 7]
