"""A mask of your own: passages that do not see one another, and a question that sees all. Run it
with python.
"""

import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.plan import OPEN
from cp_ring.testing.local_ring import LocalRing


def passages(lengths: list[int], question: int) -> Mask:
    """Passages of these lengths, one after another, and behind them a question with its answer,
    `question` tokens, all causal.
    """
    pieces, start = [], 0
    for length in lengths:
        end = start + length
        # Queries [start, end) see keys [start, end), cut by the diagonal key - query <= 0.
        pieces.append((start, end, start, end, -OPEN, 0))
        start = end
    n = start + question
    # the question sees all passages, and itself up to each token
    pieces.append((start, n, 0, n, -OPEN, 0))
    return Mask.from_pieces(n, pieces, "passages")


def main(cp=4):
    mask = passages([100, 60, 140, 80], question=100)
    n = mask.n
    assert mask.allowed(400, 0) and not mask.allowed(120, 0)

    plan = Plan.build(mask, Layout.balanced(mask, cp))
    report = plan.verify(rank_plans=True)
    print(f"{mask}: max / mean work {report.balance:.3f}")

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))

    def attend(rank_group):  # one rank: a thread of this process
        parts = (plan.layout.shard(x, rank_group.rank, dim=1) for x in (q, k, v))
        return ring_attention(*parts, rank_group, plan=plan)

    out = plan.layout.unshard(LocalRing(cp).run(attend), dim=1)
    dense = torch.from_numpy(mask.dense())
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    return report.balance


if __name__ == "__main__":
    main()
