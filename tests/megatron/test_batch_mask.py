"""A mask tensor from the data loader is accepted where it is the declared causal mask, and only
there.
"""

import pytest
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import batch_mask
from cp_ring.megatron.adapter.batch_mask import accept_causal
from cp_ring.plan.layout import Layout
from tests.rings import said

N, CP = 24, 3
LAYOUT = Layout.zigzag(N, CP)


def causal(rank):
    """As Megatron's GPT data set makes it, and as its zigzag split leaves it to a rank: [1, 1, N /
    CP, N], true where masked.
    """
    whole = torch.tril(torch.ones(N, N)) < 0.5
    first, last = whole.chunk(2 * CP)[rank], whole.chunk(2 * CP)[2 * CP - 1 - rank]
    return torch.cat([first, last])[None, None]


@pytest.fixture(autouse=True)
def compared_in_blocks(monkeypatch):
    monkeypatch.setattr(batch_mask, "_QUERIES_AT_ONCE", 3)


@pytest.mark.parametrize("rank", range(CP))
def test_the_causal_mask_of_a_rank_is_accepted_with_one_note(rank, capsys):
    accept_causal(causal(rank), LAYOUT, rank)
    accept_causal(causal(rank).expand(2, 4, -1, -1), LAYOUT, rank)
    out = capsys.readouterr().out
    assert (
        out.count("\n") == 1 and "--no-create-attention-mask-in-dataloader saves making it" in out
    )


def test_each_other_mask_is_rejected():
    right = causal(1)
    whole = (torch.tril(torch.ones(N, N)) < 0.5)[None, None]
    wrong = [causal(0), whole, ~right, right.float(), right[0], right[..., :-1]]
    for query in range(N // CP):
        for key in (0, N // 2, N - 1):
            wrong.append(right.clone())
            wrong[-1][0, 0, query, key] ^= True
    line = "that is not the causal one of this rank's tokens: leave it out (--no-create"
    for mask in wrong:
        assert line in said(accept_causal, mask, LAYOUT, 1)


def test_a_mask_that_changes_in_place_is_compared_again():
    mask = causal(2)
    accept_causal(mask, LAYOUT, 2)
    accept_causal(mask, LAYOUT, 2)
    mask[0, 0, 5, 0] = True
    with pytest.raises(ConfigError):
        accept_causal(mask, LAYOUT, 2)
