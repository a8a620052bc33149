"""Sparse attention in Megatron's layers is Megatron's own, whatever split other layers have."""

import pytest

pytest.importorskip("megatron.core.transformer.experimental_attention_variant.absorbed_mla")

from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

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


@pytest.mark.parametrize("kinds", ["p2p", "all_gather", "a2a", ["p2p", "all_gather"]])
def test_megatron_accepts_the_types_that_work(patched, kinds):
    assert config(cp_comm_type=kinds).cp_comm_type == kinds


def test_megatron_alone_knows_all_gather_only():
    with pytest.raises(AssertionError, match="allgather only"):
        config()


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_a_layer_gathers_whatever_other_layers_use(monkeypatch, kind):
    given = []

    def keep(self, *args, **kwargs):
        given.append(kwargs["cp_comm_type"])

    monkeypatch.setattr(AbsorbedMLASelfAttention, "__init__", keep)
    PATCH.apply()
    AbsorbedMLASelfAttention(None, None, 1, cp_comm_type=kind)
    PATCH.revert()
    assert given == ["all_gather"]
