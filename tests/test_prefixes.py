"""Packed prefixes, against each sequence by itself in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

import cp_ring
from cp_ring import Layout, Plan
from tests.rings import said

SIZE, HEADS = 12, 3


A, B, C = [7, 7, 1], [7, 7, 1, 2, 3, 4], [7, 7, 1, 2, 5]
SEQUENCES = {
    "nothing in common": [[1, 2, 3], [4, 5], [6]],
    "the same twice, and its beginning": [B, A, B, [7]],
    "forks of forks": [B, C, [7, 7, 9, 9], [8, 7, 1], A, [7, 8], [*C, 1, 1, 2], [*C, 1, 1, 3]],
    "a prompt and responses": [[*range(12), *response] for response in ([20] * 5, [21, 3], [20, 4, 4])],
}  # fmt: skip


def model(weights, tokens, positions, attend):
    """Hidden states [n, HEADS * SIZE] of two layers of attention."""
    table, places, projection = weights
    x = table[tokens] + places[positions]
    for _ in range(2):
        q, k, v = (x @ projection)[None].unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        x = x + attend(q, k, v)[0].flatten(1)
    return x


def logprobs(hidden, labels, weight):
    return -F.cross_entropy(hidden @ weight.T, labels, reduction="none")


def one_by_one(weights, sequences):
    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return [model(weights, torch.tensor(row), torch.arange(len(row)), attend) for row in sequences]


def packed(group, weights, pack):
    """On a rank: hidden states, log-probabilities, and this rank's gradients."""
    weights = [x.detach().requires_grad_() for x in weights]
    cp = 1 if group is None else dist.get_world_size(group)
    plan = Plan.build(pack.mask, Layout.balanced(pack.mask, cp))
    tokens, positions, labels = cp_ring.shard(
        (pack.tokens, pack.positions, pack.labels), plan, group, dim=0
    )
    hidden = model(
        weights, tokens, positions, lambda *qkv: cp_ring.ring_attention(*qkv, group, plan=plan)
    )
    found = logprobs(hidden, labels, weights[0])
    hidden, found = (cp_ring.unshard(x, plan, group, dim=0) for x in (hidden, found))
    loss = loss_of([found[index[:-1]] for index in pack.indices])
    masked = (found * pack.loss_mask).sum().detach()
    gradients = torch.autograd.grad(loss, weights)
    return hidden.detach(), found.detach(), masked, gradients


def loss_of(several):
    """Each sequence counts differently, and not by a sum of its tokens."""
    return sum((i + 1) * found.exp().sum() for i, found in enumerate(several))


@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences_are_as_one_by_one(pool, name):
    sequences = SEQUENCES[name]
    pack = cp_ring.prefix_pack(sequences, multiple=8)
    shapes = (30, HEADS * SIZE), (30, HEADS * SIZE), (HEADS * SIZE, 3 * HEADS * SIZE)
    weights = [
        torch.randn(shape, dtype=torch.float64).mul(0.3).requires_grad_() for shape in shapes
    ]
    hidden = one_by_one(weights, sequences)
    wanted = [logprobs(x[:-1], torch.tensor(row[1:], dtype=torch.int64), weights[0])
              for x, row in zip(hidden, sequences, strict=True)]  # fmt: skip
    truth = torch.autograd.grad(loss_of(wanted), weights)
    for cp in (1, 2, 4):
        ranks = pool.run(packed, cp, weights, pack)
        for outputs, found, masked, _ in ranks:
            for index, row, logprob in zip(pack.indices, hidden, wanted, strict=True):
                assert_close(outputs[index], row, rtol=0, atol=1e-10)
                assert_close(found[index[:-1]], logprob, rtol=0, atol=1e-10)
            assert_close(masked, sum(x.sum() for x in wanted), rtol=0, atol=1e-4)
        for i, gradient in enumerate(truth):
            found = sum(rank[3][i] for rank in ranks)
            assert_close(found, gradient, rtol=0, atol=1e-10)


def test_the_length_and_bad_input():
    pack = cp_ring.prefix_pack(
        [torch.arange(100).tolist() + [i] * 10 for i in range(8)], prompts=100
    )
    assert pack.mask.n == 99 + 8 * 11
    assert int(pack.loss_mask.sum()) == 80
    two = [A, A]
    for sequences, given, line in (
        ([], {}, "at least one sequence"),
        ([[]], {}, "each a list of at least one token"),
        ([[[1]]], {}, "each a list of at least one token"),
        ([[0.5]], {}, "sequence 0 must be whole numbers"),
        (two, {"prompts": [1]}, "prompts of shape [1] for 2 sequences"),
        (two, {"prompts": [1, 4]}, "sequence 1 of 3 tokens has a prompt of 4"),
        (two, {"weights": [1.0]}, "weights of shape [1] for 2 sequences"),
        (two, {"multiple": 0}, "multiple=0: it must be at least 1 token"),
    ):
        assert line in said(cp_ring.prefix_pack, sequences, **given)
