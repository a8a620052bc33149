"""Logits and losses in chunks: the same losses and gradients, and logits of few tokens at a time."""

import inspect

import pytest
import torch

from cp_ring import Options
from cp_ring.errors import ConfigError
from cp_ring.megatron import loss_chunks, settings
from cp_ring.megatron.loss_chunks import Logits, losses_in_chunks
from cp_ring.testing.oracle import error
from tests.megatron.layers import configuration

TOKENS, BATCH, VOCABULARY = 24, 2, 32


def chunk(size):
    """Puts a size of chunks in force."""
    settings.configure(Options.make(enabled=True, loss_chunk=size))


@pytest.fixture(params=["gpt", "predicting", "hybrid"])
def model(one_rank, request):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    more = {"mtp_num_layers": 2} if request.param == "predicting" else {}
    config = configuration(num_layers=1, **more)
    size = {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS}
    if request.param == "hybrid":
        from tests.parity.specs import hybrid

        return HybridModel(config, hybrid, hybrid_layer_pattern="*", **size)
    layer = specs.get_gpt_layer_local_spec()
    if more:
        size["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, layer, False)
    return GPTModel(config, layer, **size)


def losses_of(model, grad=True, **more):
    tokens = torch.randint(
        VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(3)
    )
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(grad):
        positions = torch.arange(TOKENS).expand(BATCH, -1)
        labels = tokens[:, 1:].contiguous()
        return model(tokens[:, :-1], positions, mask, labels=labels, **more)


def gradients(model, losses):
    model.zero_grad()
    # as a loss mask, tokens weigh differently
    (losses * torch.linspace(0, 1, TOKENS)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size, most", [(10, 10), (1, 2), (1 << 20, 24), (47, 24)])
def test_losses_and_gradients_are_those_of_all_logits(applied, model, monkeypatch, size, most):
    """A chunk is of whole positions of all batch rows, and there are at least two."""
    seen, whole = [], type(model).compute_language_model_loss
    monkeypatch.setattr(
        type(model),
        "compute_language_model_loss",
        lambda *args: seen.append(args[1].numel()) or whole(*args),
    )
    wanted = losses_of(model)
    truth = gradients(model, wanted)
    heads = 1 + (model.config.mtp_num_layers or 0)
    assert seen == [BATCH * TOKENS] * heads
    applied("loss_chunks")
    chunk(size)
    seen.clear()
    losses = losses_of(model)
    assert losses.shape == wanted.shape
    assert sum(seen) == BATCH * TOKENS * heads
    assert max(seen) <= most
    assert error(losses, wanted) < 1e-6
    found = gradients(model, losses)
    assert sum(seen) == 2 * BATCH * TOKENS * heads, (
        "backward computes the logits of each chunk again"
    )
    assert max(error(found[name], truth[name]) for name in truth) < 1e-5
    seen.clear()
    assert torch.equal(losses_of(model, grad=False), losses)
    assert max(seen) <= most


def test_a_script_with_an_output_processor_of_its_own_is_rejected(applied, model):
    applied("loss_chunks")
    if "output_processor" not in inspect.signature(model.forward).parameters:
        pytest.skip("this model takes none")

    def own(*, labels, **_):
        return torch.ones_like(labels).float()

    chunk(0)
    assert losses_of(model, output_processor=own).sum() == BATCH * TOKENS
    chunk(10)
    with pytest.raises(
        ConfigError,
        match="--cp-ring-loss-chunk: the script gives the model an output processor of its own",
    ):
        losses_of(model, output_processor=own)


def test_sequence_parallel_tokens_get_their_own_labels():
    """The output layer then gathers the same tokens of every tensor-parallel rank: labels are taken
    in that order.
    """
    chunk(12)
    tp, tokens = 3, 8
    whole = torch.randn(tp * tokens, BATCH, VOCABULARY)
    labels = torch.randint(VOCABULARY, (BATCH, tp * tokens))
    mine = torch.arange(tokens).view(tokens, 1, 1).expand(-1, BATCH, 1)

    def gather(hidden):
        return torch.cat([whole[rank * tokens + hidden[:, 0, 0]] for rank in range(tp)])

    def loss(wanted, logits):
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), wanted, reduction="none")

    found = losses_in_chunks(loss)(labels, Logits(gather, mine))
    assert torch.equal(found, loss(labels, whole))


def test_a_model_may_scale_before_it_has_logits_and_name_the_input_of_its_output_layer():
    """As on Megatron's branch dev."""
    assert loss_chunks._scaled(abs)(None) is None
    logits, _ = loss_chunks._OutputLayer(lambda x: (x + 1, None))(input_=2)
    assert logits.of(3) == 4 and logits.hidden == 2
