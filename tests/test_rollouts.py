"""Log-probabilities and packed prefixes, against each sequence by itself in float64."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import cp_ring
from cp_ring import ConfigError, Layout, Mask, Plan, PlanError
from cp_ring.testing.local_ring import LocalRing

VOCAB, SIZE, HEADS = 29, 12, 3
DOCUMENTS = [0, 1, 20, 20, 37, 48]


def draw(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def whole(hidden, tokens, weight, edges, temperature=1.0):
    """Log-probabilities and entropies [2, b, n] with a dense softmax, document by document."""
    found = torch.zeros(2, *tokens.shape, dtype=torch.float64)
    for start, end in pairwise(edges):
        if end - start > 1:
            p = (hidden[:, start : end - 1].double() @ weight.double().T / temperature).softmax(-1)
            label = tokens[:, start + 1 : end, None]
            found[0, :, start : end - 1] = p.gather(-1, label)[..., 0].log()
            found[1, :, start : end - 1] = -(p * p.log()).sum(-1)
    return found


def weighed(found):
    """A loss in which every entry counts differently."""
    return (found * torch.linspace(1, 2, found.numel(), dtype=found.dtype).view_as(found)).sum()


def of_shard(group, hidden, tokens, weight, layout, given):
    """On a rank of `group`, or of a mesh (tensor parallel, context parallel)."""
    tp, part = None, weight
    if given.get("tp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
        group, tp = mesh["cp"], mesh["tp"]
        # the ranks may have parts of different sizes
        part = weight.split([10, VOCAB - 10])[tp.get_local_rank()]
    mine, part = (x.detach().requires_grad_() for x in (cp_ring.shard(hidden, layout, group), part))
    tokens = cp_ring.shard(tokens, layout, group)
    labels = cp_ring.roll(
        tokens, -1, layout, group, cu_seqlens=given.get("edges", [0, layout.n]), fill=-100
    )
    logits = mine @ part.T if given.get("logits") else mine
    options = {"temperature": 0.7, "chunk": 7, "entropy": True}
    found = cp_ring.logprobs(logits, labels, None if given.get("logits") else part, tp, **options)
    weights = torch.linspace(1, 2, 2 * hidden.shape[0] * layout.n, dtype=torch.float64)
    weights = cp_ring.shard(weights.view(2, *hidden.shape[:-1]), layout, group, dim=2)
    gradients = torch.autograd.grad((found * weights).sum(), (mine, part))
    if tp and given.get("logits"):  # each rank has the gradient through its part of the logits
        dist.all_reduce(gradients[0], group=tp.get_group())
    return found.detach(), *gradients


@pytest.mark.parametrize(
    ("cp", "given"),
    [
        (1, {}),
        (2, {"edges": DOCUMENTS}),
        (4, {"edges": DOCUMENTS, "logits": True}),
        (4, {}),
        (4, {"edges": DOCUMENTS, "tp": True}),
        (4, {"logits": True, "tp": True}),
    ],
)
def test_logprobs_and_gradients_are_those_of_the_whole_sequence(pool, cp, given):
    hidden, weight = (x.requires_grad_() for x in draw((2, 48, SIZE), (VOCAB, SIZE)))
    tokens = torch.randint(VOCAB, (2, 48))
    wanted = whole(hidden, tokens, weight, given.get("edges", [0, 48]), 0.7)
    truth = torch.autograd.grad(weighed(wanted), (hidden, weight))
    mask = Mask.documents(DOCUMENTS)
    layout = Layout.balanced(mask, 2 if given.get("tp") else cp)
    arguments = hidden.detach(), tokens, weight.detach(), layout, given
    ranks = pool.run(of_shard, cp, *arguments)
    parts = [ranks[:2], ranks[2:]] if given.get("tp") else [ranks]
    for part in parts:
        torch.testing.assert_close(
            layout.unshard([x[0] for x in part], 2), wanted, rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            layout.unshard([x[1] for x in part], 1), truth[0], rtol=0, atol=1e-12
        )
    dweight = torch.cat([sum(x[2] for x in part) for part in parts])
    torch.testing.assert_close(dweight, truth[1], rtol=0, atol=1e-11)


class Largest(TorchDispatchMode):
    """The elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


def test_logits_are_those_of_a_chunk_also_in_backward():
    hidden, weight = draw((300, 4), (500, 4), dtype=torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    kept = []
    keeping = saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x)
    with Largest() as seen, keeping:
        cp_ring.logprobs(hidden, torch.arange(300), weight, chunk=10, entropy=True).sum().backward()
    assert seen.elements == 10 * 500
    assert sum(kept) < 10 * 500, "backward computes logits again"


def test_bfloat16_hidden_and_a_wide_weight():
    """The softmax is in float32, and so is the sum of the weight's gradients over chunks."""
    hidden, weight = draw((4096, 8), (16, 8), dtype=torch.bfloat16)
    labels = torch.randint(16, (4096,))
    wide = weight.float().requires_grad_()
    found = cp_ring.logprobs(hidden, labels, wide, chunk=64)
    assert found.dtype == torch.float32
    found.sum().backward()
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, labels, reduction="sum").neg().backward()
    assert float((wide.grad - exact.grad).norm() / exact.grad.norm()) < 2e-3


def test_hidden_vocabulary_entries_have_no_share():
    logits = draw((5, VOCAB))[0]
    logits[:, 20:] = -torch.inf
    logits.requires_grad_()
    found = cp_ring.logprobs(logits, torch.tensor([0, 1, 2, 3, -100]), entropy=True)
    expected = cp_ring.logprobs(logits[:, :20], torch.tensor([0, 1, 2, 3, -100]), entropy=True)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(weighed(found), logits)
    assert gradient.isfinite().all() and not gradient[:, 20:].any() and not gradient[4].any()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"labels": torch.tensor([0, VOCAB])}, "label 29: it must be below the vocabulary's 29"),
        ({"labels": torch.tensor([-1, 0])}, "label -1: it must be below"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "needs labels of shape .2., not .3."),
        ({"chunk": 0}, "chunk=0: it must be at least 1 token"),
        ({"temperature": 0.0}, "temperature=0.0: it must be a finite number above 0"),
    ],
)
def test_bad_input_of_logprobs(given, line):
    with pytest.raises(ConfigError, match=line):
        cp_ring.logprobs(
            **{"hidden": torch.zeros(2, VOCAB), "labels": torch.tensor([0, 1]), **given}
        )


def test_a_vocabulary_over_threads_is_rejected():
    with pytest.raises(ConfigError, match="vocab_group must be a process group"):
        LocalRing(2).run(
            lambda group: cp_ring.logprobs(torch.zeros(1, 2), torch.zeros(1).long(), None, group)
        )


def other_labels(group, chunk, shift):
    labels = torch.arange(4) + shift * group.rank()
    with pytest.raises(ConfigError, match="the ranks of vocab_group pass other labels or chunks"):
        cp_ring.logprobs(torch.zeros(4, VOCAB), labels, None, group, chunk=8 + chunk * group.rank())


def test_ranks_of_a_vocabulary_with_other_tokens_stop(pool):
    pool.run(other_labels, 2, 0, 1)
    pool.run(other_labels, 2, 1, 0)


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
    found = cp_ring.logprobs(hidden, labels, weights[0], chunk=5)
    hidden, found = (cp_ring.unshard(x, plan, group, dim=0) for x in (hidden, found))
    loss = loss_of([found[index[:-1]] for index in pack.indices])
    masked = (found * pack.loss_mask).sum().detach()
    gradients = torch.autograd.grad(loss, weights)
    return hidden.detach(), found.detach(), masked, gradients


def loss_of(logprobs):
    """Each sequence counts differently, and not by a sum of its tokens."""
    return sum((i + 1) * found.exp().sum() for i, found in enumerate(logprobs))


@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences_are_as_one_by_one(pool, name):
    sequences = SEQUENCES[name]
    pack = cp_ring.prefix_pack(sequences, multiple=8)
    weights = draw((30, HEADS * SIZE), (30, HEADS * SIZE), (HEADS * SIZE, 3 * HEADS * SIZE))
    weights = [x.mul(0.3).requires_grad_() for x in weights]
    hidden = one_by_one(weights, sequences)
    wanted = [whole(x[None], torch.tensor([row]), weights[0], [0, len(row)])[0, 0, :-1]
              for x, row in zip(hidden, sequences, strict=True)]  # fmt: skip
    truth = torch.autograd.grad(loss_of(wanted), weights)
    for cp in (1, 2, 4):
        ranks = pool.run(packed, cp, weights, pack)
        for outputs, logprobs, masked, _ in ranks:
            for index, row, logprob in zip(pack.indices, hidden, wanted, strict=True):
                torch.testing.assert_close(outputs[index], row, rtol=0, atol=1e-10)
                torch.testing.assert_close(logprobs[index[:-1]], logprob, rtol=0, atol=1e-10)
            torch.testing.assert_close(masked, sum(x.sum() for x in wanted), rtol=0, atol=1e-4)
        for i, gradient in enumerate(truth):
            found = sum(rank[3][i] for rank in ranks)
            torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)


def test_random_sequences_share_every_prefix():
    """Every token that a sequence is given by the pack is its own, behind the same tokens; none is
    stored twice but where sequences part.
    """
    draw = random.Random(0)
    for _ in range(300):
        rows = [
            [draw.randrange(3) for _ in range(draw.randint(1, 7))]
            for _ in range(draw.randint(1, 9))
        ]
        prompts = [draw.randint(0, len(row)) for row in rows]
        factors = [draw.random() for _ in rows]
        pack = cp_ring.prefix_pack(rows, prompts, factors)
        allowed, total = pack.mask.dense(), torch.zeros(pack.mask.n)
        for row, index, prompt, factor in zip(rows, pack.indices, prompts, factors, strict=True):
            assert pack.tokens[index].tolist() == row
            assert pack.labels[index[:-1]].tolist() == row[1:]
            assert pack.positions[index].tolist() == list(range(len(row)))
            for at, i in enumerate(index.tolist()):
                assert set(allowed[i].nonzero()[0]) == set(index[: at + 1].tolist())
                if max(prompt, 1) <= at + 1 < len(row):
                    total[i] += factor
        torch.testing.assert_close(pack.loss_mask, total)
        prefixes = {tuple(row[:i]) for row in rows for i in range(1, len(row) + 1)}
        following = {
            prefix: len({p[-1] for p in prefixes if p[:-1] == prefix}) for prefix in prefixes
        }
        assert pack.mask.n == sum(max(1, count) for count in following.values())


def test_savings_and_bad_input():
    pack = cp_ring.prefix_pack(
        [torch.arange(100).tolist() + [i] * 10 for i in range(8)], prompts=100
    )
    assert pack.mask.n == 99 + 8 * 11 and pack.savings == 1 - pack.mask.n / 880
    assert int(pack.loss_mask.sum()) == 80
    for arguments, line in (
        ([], "at least one sequence"),
        ([[]], "each a list of at least one token"),
        ([[[1]]], "each a list of at least one token"),
        ([[0.5]], "sequence 0 must be whole numbers"),
    ):
        with pytest.raises(PlanError, match=line):
            cp_ring.prefix_pack(arguments)
    for given, line in (
        ({"prompts": [1]}, r"prompts of shape \[1\] for 2 sequences"),
        ({"prompts": [1, 4]}, "sequence 1 of 3 tokens has a prompt of 4"),
        ({"weights": [1.0]}, r"weights of shape \[1\] for 2 sequences"),
        ({"multiple": 0}, "multiple=0: it must be at least 1 token"),
    ):
        with pytest.raises(PlanError, match=line):
            cp_ring.prefix_pack([A, A], **given)
