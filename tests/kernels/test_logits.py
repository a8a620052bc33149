"""The largest attention logit of each head: over all ranks it is that of the dense scores under the
mask.
"""

import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.attention import attention_of
from cp_ring.errors import KernelError
from cp_ring.inputs import AttentionOptions, Inputs
from cp_ring.kernels import choose, cpu
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, logits

N = 48


def of_ranks(case, plan, **options):
    """Out of all ranks, and the largest logits of each."""

    def rank(group):
        shards = [plan.layout.shard(x, group.rank, 1) for x in case[:3]]
        inputs = Inputs(*shards)
        output = attention_of(plan, group, AttentionOptions(max_logit=True, **options), inputs)(
            inputs
        )
        return output.out, output.max_logit

    parts = LocalRing(plan.cp).run(rank)
    return plan.layout.unshard([out for out, _ in parts], 1), [found for _, found in parts]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_over_all_ranks_it_is_that_of_the_dense_scores(cp, monkeypatch):
    case = Case.draw(N, b=2, h=4, g=2, d=8)
    masks = [
        Mask.causal(N),
        Mask.causal(N, window=(5, 0)),
        Mask.documents([0, 7, 30, N]),
        Mask.full(N),
    ]
    for mask in masks:
        plan = Plan.build(mask, Layout.zigzag(N, cp) if cp > 1 else Layout.contiguous(N, 1))
        truth = logits(case.q.double(), case.k.double(), mask.dense()).amax((0, 2, 3))
        plain, found = of_ranks(case, plan)
        torch.testing.assert_close(torch.stack(found).amax(0).double(), truth, rtol=1e-6, atol=0)
        assert found[0].dtype == torch.float32 and found[0].shape == (4,)
    monkeypatch.setattr(cpu, "_BLOCK", 50)
    out, found = of_ranks(case, plan)
    torch.testing.assert_close(torch.stack(found).amax(0).double(), truth, rtol=1e-6, atol=0)
    assert torch.equal(out, plain)


def test_a_kernel_that_does_not_tell_them_is_rejected():
    with pytest.raises(
        KernelError, match=r"'reference': reference does not tell the largest logits"
    ):
        choose(
            "reference", device=torch.device("cpu"), dtype=torch.float32, d=8, e=8, max_logit=True
        )
