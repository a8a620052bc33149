"""The mean loss is that of the tokens of all context-parallel ranks; with as many on each rank the
bits are those of stock Megatron.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cp_ring.patches import loss_average
from tests.rings import said

TOKENS, MICROBATCHES = 8, 4  # tokens of a rank
UNEVEN = [1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, *[0] * 8]
EVEN = [1, 0, 1, 1, 0, 1, 1, 0] * 4


def calc_loss(group, mask, stock=False, by_token=False, mean=""):
    """Megatron's own division of a rank's loss, patched or not: its loss, the gradients of its
    tokens as ranks average them, the report, and the number of tokens.
    """
    from megatron.core.pipeline_parallel import schedules

    cp, mine = group.size(), slice(group.rank() * TOKENS, (group.rank() + 1) * TOKENS)
    mask = torch.tensor(mask[: TOKENS * cp], dtype=torch.float32)[mine]
    losses = torch.linspace(1.0, 3.0, TOKENS * cp)[mine].clone().requires_grad_()

    def loss_func(output):
        total, count = (output * mask).sum(), mask.sum().int()
        if mean:
            return means(total, count, group)[mean], {"lm loss": total.detach()}
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    config = SimpleNamespace(
        context_parallel_size=cp, calculate_per_token_loss=by_token, timers=None
    )
    model = SimpleNamespace(module=SimpleNamespace(pg_collection=SimpleNamespace(cp=group)))
    patched = partial(loss_average._over_all_tokens, schedules.forward_step_calc_loss)
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


def means(total, count, group):
    """What a loss function may return that returns a mean: of the tokens of this rank, and of all
    ranks in two ways. Ranks without tokens have no mean.
    """
    sums = torch.stack([total.detach(), count.float()])
    torch.distributed.all_reduce(sums, group=group)
    share = total / sums[1]
    value = share + (sums[0] / sums[1] - share).detach()
    return {"of the rank": total / count.clamp(min=1), "share": share, "value": value}


def trained_by_a_mean(group, mask, kind, **options):
    """The gradients, and what is said."""
    lines, groups = [], dict.fromkeys(("tp", "dp"), SimpleNamespace(rank=int)) | {"cp": group}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loss_average, "note", lambda line, here: lines.append((line, here)))
        own = loss_average.compat.group_of
        patched.setattr(
            loss_average.compat,
            "group_of",
            lambda of, name: groups[name] if of is None else own(of, name),
        )
        return calc_loss(group, mask, mean=kind, **options)[1], lines


ON_ONE_RANK = [1, 1, 0, 1, *[0] * 28]


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("kind", ["of the rank", "share", "value"])
def test_a_mean_has_the_gradients_of_a_sum(pool, kind, cp):
    """Those of a rank's own tokens are divided, and a line says so; where only one rank has tokens,
    its mean is that of all.
    """
    for mask in (EVEN, UNEVEN, ON_ONE_RANK):
        sums = pool.run(calc_loss, cp, mask)
        for rank, (gradients, lines) in enumerate(pool.run(trained_by_a_mean, cp, mask, kind)):
            alike = mask is not UNEVEN or kind != "of the rank"
            assert torch.allclose(gradients, sums[rank][1]) is alike
            assert len(lines) == (mask is not ON_ONE_RANK and kind == "of the rank")
            for line, here in lines:
                assert f"divided by {cp}, the context-parallel ranks" in line and here is (
                    rank == 0
                )


def by_tokens(group):
    return said(trained_by_a_mean, group, EVEN, "share", by_token=True)


def test_a_mean_is_rejected_where_gradients_are_divided_by_tokens(pool):
    for line in pool.run(by_tokens, 2):
        assert line.startswith("the loss function returns a mean, but --calculate-per-token-loss")
