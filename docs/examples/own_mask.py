"""A mask of your own: video frames see themselves both ways, and every earlier frame. Run: python docs/examples/own_mask.py"""

import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, RingPlan, ring_attention
from cp_ring.plan import OPEN, Tiles
from cp_ring.testing.local_ring import LocalRing


def block_causal(n: int, block: int) -> Mask:
    """Query i sees all keys up to the end of its own block of `block` tokens."""
    pieces = []
    for start in range(0, n, block):
        end = min(start + block, n)
        # Queries [start, end) see keys [0, end); OPEN, OPEN: no diagonal cuts this rectangle.
        pieces.append((start, end, 0, end, -OPEN, OPEN))
    return Mask(n, Tiles.of(pieces), "block_causal")


def main(cp=4):
    n, block = 480, 48
    mask = block_causal(n, block)
    assert mask.allowed(0, block - 1) and not mask.allowed(0, block)

    plan = RingPlan.build(mask, Layout.balanced(mask, cp))
    report = plan.verify(rank_plans=True)
    print(f"{mask}: max / mean work {report.balance:.3f}")

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))

    def attend(rank_group):  # one rank: a thread of this process
        parts = (plan.layout.shard(x, rank_group.rank, dim=1) for x in (q, k, v))
        return ring_attention(*parts, rank_group, plan=plan)

    out = plan.layout.unshard(LocalRing(cp).run(attend), dim=1)
    dense = torch.from_numpy(mask.dense())
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    return report.balance


if __name__ == "__main__":
    main()
