"""A checkpoint of stock Megatron continues with ring attention, and one of ring attention continues
with stock Megatron.
"""

import shlex

import pytest
import torch

from tests.megatron.launch import RING, trace, train
from tests.megatron.layers import core_attention

STOCK = ["--cp-ring-cpu"]
SINKS = shlex.split("--softmax-type learnable --init-method-std 0.1 --train-iters 6")
SAVE = ["--save-interval", "3"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """On two ranks stock Megatron is data parallel, at context parallel size 1; each job saves
    after step 3 or begins there.
    """
    folder = tmp_path_factory.mktemp("interchange")
    stock, ring = str(folder / "from_stock"), str(folder / "from_ring")
    jobs = {
        "stock": [*STOCK, *SAVE, "--save", stock],
        "ring": [*RING, *SAVE, "--save", ring],
        "ring_from_stock": [*RING, "--load", stock, "--ckpt-step", "3"],
        "stock_from_ring": [*STOCK, "--load", ring, "--ckpt-step", "3"],
    }
    train(2, {name: flags + SINKS for name, flags in jobs.items()}, folder)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize(
    "job, straight", [("ring_from_stock", "stock"), ("stock_from_ring", "ring")]
)
def test_continues_with_the_loss_it_would_have_had(traces, job, straight):
    found, wanted = trace(traces, job), trace(traces, straight)
    assert list(found) == [4, 5, 6] and list(wanted) == [1, 2, 3, 4, 5, 6]
    assert wanted[1]["loss"] - wanted[6]["loss"] > 0.1
    for step, here in found.items():
        assert here["rows"] == wanted[step]["rows"]
        assert here["loss"] == pytest.approx(wanted[step]["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(wanted[step]["grad_norm"], rel=1e-5)


class LikeTransformerEngine(torch.nn.Module):
    """The state of TransformerEngine's attention: its offset, and an extra state that is empty
    without fp8.
    """

    def __init__(self, config, **_):
        super().__init__()
        self.softmax_offset = torch.nn.Parameter(torch.randn(config.num_attention_heads))

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.numel() == 0

    def sharded_state_dict(self, prefix, metadata):
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, **metadata
        )


def sharded(layer):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return layer.sharded_state_dict(prefix="core_attention.", metadata={"dp_cp_group": group})


def keys(layer):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = sharded(layer)
    tensors = {name: value for name, value in state.items() if isinstance(value, ShardedTensor)}
    return {
        name: (part.key, part.global_shape, part.global_offset, part.dtype)
        for name, part in tensors.items()
    }


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_a_checkpoint_holds_what_stock_attention_holds(one_rank, softmax_type):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    ours, stock = (
        core_attention(kind, {"softmax_type": softmax_type}) for kind in (None, DotProductAttention)
    )
    assert keys(ours) == keys(stock)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert len(keys(ours)) == (softmax_type == "learnable")


def test_transformer_engine_and_back(one_rank):
    learned = {"softmax_type": "learnable"}
    ours, theirs = core_attention(None, learned), core_attention(LikeTransformerEngine, learned)
    assert "_extra_state" in theirs.state_dict()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(ours.softmax_offset, theirs.softmax_offset)
    # by which Megatron Bridge finds out, without knowing the class, how the parameter is split
    assert ours.tensor_model_parallel and ours.partition_dim == ours.softmax_offset.partition_dim
    torch.nn.init.normal_(ours.softmax_offset)
    loaded = theirs.load_state_dict(ours.state_dict(), strict=False)
    # which TransformerEngine does without
    assert loaded.missing_keys == ["_extra_state"] and not loaded.unexpected_keys
    assert torch.equal(ours.softmax_offset, theirs.softmax_offset)
