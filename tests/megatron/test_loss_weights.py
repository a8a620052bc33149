"""Loss masks with fractions: the loss and the number of tokens that Megatron divides by are the
same at any split.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.megatron.groups import Group

gpt = pytest.importorskip("cp_ring.megatron.gpt")
MASK = torch.tensor([[0.25, 1.0, 0.75, 0.0, 1.5, 0.5, 0.25, 1.0, 0.75, 0.75, 0.0, 0.25]])
LOSSES = torch.arange(12.0)[None] + 1


@pytest.fixture
def on_rank(monkeypatch):
    """The loss function on a rank of `cp`, which holds the tokens `of`."""

    def call(mask, rank, cp, of, by_token=True):
        args = SimpleNamespace(
            check_for_nan_in_loss_and_grad=False, calculate_per_token_loss=by_token
        )
        monkeypatch.setattr(gpt, "get_args", lambda: args)
        monkeypatch.setattr(
            gpt.parallel_state, "get_context_parallel_group", lambda: Group(rank, cp)
        )
        return gpt.loss_function(mask[:, of], LOSSES[:, of], weight=mask.sum(dtype=torch.float64))

    return call


@pytest.mark.parametrize("cp", [1, 2, 3, 6])
@pytest.mark.parametrize("mask", [MASK, MASK.ceil(), 0 * MASK])
def test_counts_of_all_ranks_add_up_to_the_same_number(on_rank, mask, cp):
    parts = [
        on_rank(mask, rank, cp, slice(12 // cp * rank, 12 // cp * (rank + 1))) for rank in range(cp)
    ]
    assert sum(int(count) for _, count, _ in parts) == round(float(mask.sum()))
    # Megatron adds it to whole numbers in place
    assert all(count.dtype == torch.int for _, count, _ in parts)
    reports = torch.stack([report["lm loss"] for _, _, report in parts]).sum(0)
    assert torch.equal(reports, torch.stack([(LOSSES * mask).sum(), mask.sum()]))
