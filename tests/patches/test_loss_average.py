"""The mean loss is that of the tokens of all context-parallel ranks; with as many on each rank the
bits are those of stock Megatron.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cp_ring.patches import loss_average

TOKENS, MICROBATCHES = 8, 4  # tokens of a rank
UNEVEN = [1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, *[0] * 8]
EVEN = [1, 0, 1, 1, 0, 1, 1, 0] * 4


def calc_loss(group, mask, stock=False, by_token=False):
    """Megatron's own division of a rank's loss, patched or not: its loss, the gradients of its
    tokens as ranks average them, the report, and the number of tokens.
    """
    from megatron.core.pipeline_parallel import schedules

    cp, mine = group.size(), slice(group.rank() * TOKENS, (group.rank() + 1) * TOKENS)
    mask = torch.tensor(mask[: TOKENS * cp], dtype=torch.float32)[mine]
    losses = torch.linspace(1.0, 3.0, TOKENS * cp)[mine].clone().requires_grad_()

    def loss_func(output):
        total, count = (output * mask).sum(), mask.sum().int()
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    config = SimpleNamespace(
        context_parallel_size=cp, calculate_per_token_loss=by_token, timers=None
    )
    model = SimpleNamespace(module=SimpleNamespace(pg_collection=SimpleNamespace(cp=group)))
    patched = loss_average._over_all_tokens(schedules.forward_step_calc_loss)
    call = schedules.forward_step_calc_loss if stock else patched
    reports = []
    loss, count = call(
        model, losses, loss_func, config, None, False, MICROBATCHES, reports, cp, True
    )
    loss.backward()
    return loss.detach(), losses.grad, reports[0]["lm loss"], count


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_as_many_tokens_on_each_rank_give_the_bits_of_stock_megatron(pool, cp):
    """So does division by the number of tokens of all ranks, which is not touched."""
    for mask, options in ((EVEN, {}), (UNEVEN, {"by_token": True})):
        ours = pool.run(calc_loss, cp, mask, **options)
        stock = pool.run(calc_loss, cp, mask, stock=True, **options)
        for mine, theirs in zip(ours, stock, strict=True):
            compared = 4 if options else 3  # patched, a mean counts the tokens of all ranks
            assert all(map(torch.equal, mine[:compared], theirs[:compared]))


def of_a_mean(group):
    """What a loss function returns that returns a mean, and what is said, of two microbatches."""
    said, cp = [], group.size()
    own, loss_average.note = loss_average.note, lambda line, here: said.append((line, here))
    groups = {"cp": group, "tp": SimpleNamespace(rank=int), "dp": SimpleNamespace(rank=int)}
    group_of = loss_average.compat.group_of
    loss_average.compat.group_of = lambda collection, name: groups[name]
    try:
        outputs = loss_average.average((torch.tensor(3.0), {}), group, True)
        loss_average.average((torch.tensor(3.0), {}), group, False)  # as Megatron adds up sums
    finally:
        loss_average.note, loss_average.compat.group_of = own, group_of
    return outputs, said, cp


def test_a_mean_stays_as_it_is_and_a_line_says_so(pool):
    for rank, ((mean, report), said, _) in enumerate(pool.run(of_a_mean, 2)):
        ((line, here),) = said
        assert (float(mean), report) == (3.0, {})
        assert line.startswith("the loss function returns a mean") and here is (rank == 0)
