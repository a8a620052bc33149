"""Attention dropout in Megatron's layers: what decides which weights are dropped, recomputation,
and random states.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cp_ring.megatron.flags import attention_rules
from cp_ring.megatron.flags.rule import Job, problem
from cp_ring.megatron.layers import dropout_keys

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)


@pytest.fixture
def make_layer(one_rank):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.ring_core_attention import RingDotProductAttention

    def make(number, p=0.5):
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=p
        )
        return RingDotProductAttention(config, number, AttnMaskType.causal, "self")

    return make


def states():
    from megatron.core import tensor_parallel

    found = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {name: state for name, state in found.items() if "cp_ring" not in name} | {
        "default": torch.get_rng_state()
    }


@no_cuda
def test_layers_and_microbatches_differ_and_draw_from_no_other_state(make_layer):
    q = torch.randn(16, 2, 4, 8)
    first, second = make_layer(1), make_layer(2)
    before = states()
    outs = [layer(q, q, q) for layer in (first, second, first)]
    assert all(torch.equal(state, before[name]) for name, state in states().items())
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    first.eval()
    plain = make_layer(1, p=0.0)(q, q, q)
    assert torch.equal(first(q, q, q), plain) and not torch.equal(outs[0], plain)
    first.train()
    assert not torch.equal(first(q, q, q), outs[2])


@no_cuda
def test_layers_that_predict_further_tokens_have_counters_of_their_own(applied, one_rank):
    """They count from 1 again, and from pipeline stage to stage they stand beside other layers of
    the decoder.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.ring_core_attention import RingDotProductAttention

    applied("core_attention")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.5,
        mtp_num_layers=2,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(
        config,
        spec,
        64,
        16,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    layers = [layer for layer in model.modules() if isinstance(layer, RingDotProductAttention)]
    assert [layer.name for layer in layers] == [1, 2, "MTP 1", "MTP 2"]
    numbers = [layer.dropout_number for layer in layers]
    assert (
        numbers
        == [1, 2, dropout_keys.number_of_prediction(1, 0), dropout_keys.number_of_prediction(2, 0)]
        and len(set(numbers)) == 4
    )


@no_cuda
def test_the_count_goes_on_where_the_states_of_a_checkpoint_are(make_layer):
    from megatron.core import tensor_parallel

    q, layer = torch.randn(16, 2, 4, 8), make_layer(1)
    layer(q, q, q)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    saved = tracker.get_states()
    expected = layer(q, q, q)
    torch.manual_seed(99)  # the seed is that of the first call
    layer(q, q, q)
    tracker.set_states(saved)
    assert torch.equal(make_layer(1)(q, q, q), expected)


@no_cuda
def test_recomputed_layers_drop_the_same_weights(make_layer, applied):
    from megatron.core import tensor_parallel

    q, weight = torch.randn(16, 2, 4, 8), torch.randn(16, 2, 32)

    def gradient(run):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        layer, x = make_layer(1), q.clone().requires_grad_()
        (run(lambda x: layer(x, x, x), x) * weight).sum().backward()
        return x.grad

    def recomputed(function, x):
        return tensor_parallel.checkpoint(function, False, x)

    plain = gradient(lambda function, x: function(x))
    assert torch.equal(gradient(recomputed), plain)
    applied("recompute")
    assert torch.equal(gradient(recomputed), plain)


def test_a_layer_that_serves_all_depths_has_the_same_keys_at_any_data_parallel_size(monkeypatch):
    from megatron.core import tensor_parallel

    def keys(rank, ranks, microbatches):
        tracker = tensor_parallel.get_cuda_rng_tracker()
        before = tracker.get_states()
        monkeypatch.setattr(dropout_keys, "_data_parallel", lambda: (rank, ranks))
        try:
            return [
                tuple(dropout_keys.next_key(7, calls=3) for _ in range(3))
                for _ in range(microbatches)
            ]
        finally:
            tracker.set_states(before)

    alone, two = keys(0, 1, 4), [keys(rank, 2, 2) for rank in (0, 1)]
    assert (
        alone == [two[0][0], two[1][0], two[0][1], two[1][1]]
        and len({key for each in alone for key in each}) == 12
    )


def test_a_job_counts_the_microbatches_before_it(monkeypatch):
    class Arguments:
        seed, consumed_train_samples, micro_batch_size = 7, 96, 2

    monkeypatch.setattr(dropout_keys, "arguments", lambda: Arguments)
    assert (dropout_keys._seed(), dropout_keys._microbatches_before()) == (7, 48)
    monkeypatch.setattr(dropout_keys, "arguments", lambda: None)
    assert (dropout_keys._seed(), dropout_keys._microbatches_before()) == (torch.initial_seed(), 0)


def test_no_kernel_for_cuda_is_chosen_by_itself(monkeypatch):
    job = Job(SimpleNamespace(attention_dropout=0.1))
    assert not problem(job, attention_rules.ATTENTION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert problem(job, attention_rules.ATTENTION).startswith(
        "--cp-ring-kernel auto does not support --attention-dropout 0.1"
    )


@no_cuda
def test_hidden_dropout_draws_the_masks_of_stock_megatron(applied, one_rank):
    from tests.megatron.test_recompute import batches, build, forward

    tokens = batches()[0]

    def loss(model, seed=5):
        torch.manual_seed(seed)
        return float(forward(model, tokens).detach())

    stock = loss(build())
    applied("core_attention")
    model = build()
    assert abs(loss(model) / stock - 1) < 1e-6
    assert abs(loss(model, seed=6) / stock - 1) > 1e-5  # other masks show


@no_cuda
def test_hidden_dropout_has_one_random_state_on_all_context_parallel_ranks(one_rank, monkeypatch):
    """Megatron's own seeds do not depend on the context-parallel rank, so the i-th tokens of all
    ranks get one mask.
    """
    initialize = pytest.importorskip("megatron.training.initialize")
    from megatron.core import parallel_state

    found = []
    for rank in (0, 1):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        initialize._set_random_seed(7)
        found.append(states())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(state, found[1][name]) for name, state in found[0].items())
