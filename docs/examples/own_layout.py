"""A layout of your own, selected by its name. Run: python docs/examples/own_layout.py"""

import numpy as np
import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, ring_attention, shard
from cp_ring.plan.layout import LAYOUTS
from cp_ring.testing.local_ring import LocalRing


def striped(mask: Mask, cp: int) -> Layout:
    """Eight chunks a rank, dealt in turn: rank r holds chunks r, r + cp, r + 2 * cp, ..."""
    chunks = 8 * cp
    edges = np.arange(chunks + 1) * mask.n // chunks
    return Layout(mask.n, cp, edges, np.arange(chunks) % cp, "striped")


LAYOUTS["striped"] = striped  # now layout="striped" and --cp-ring-layout striped name it


def main(cp=4):
    n = 512
    layout = striped(Mask.causal(n), cp)
    assert layout.tokens_per_rank.tolist() == [n // cp] * cp
    assert layout.ranges(1)[:2] == [(16, 32), (80, 96)]

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))

    def attend(group):
        return ring_attention(
            *shard((q, k, v), layout, group), group, causal=True, layout="striped"
        )

    out = layout.unshard(LocalRing(cp).run(attend), dim=1)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
