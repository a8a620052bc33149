"""A route of your own, selected by its name. Run: python docs/examples/own_route.py"""

import torch
import torch.nn.functional as F

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.plan.routes import ROUTES, Route, direct, ring
from cp_ring.testing.local_ring import LocalRing


def keys_direct_gradients_ring(need, cp):
    """Keys go straight from their owner; gradients are summed along the ring, so that each rank
    gets one message, not many.

    `need` lists what each rank reads at each hop. A route answers with two tables: keys out,
    gradients home.
    """
    keys, _ = direct(need, cp)
    _, gradients = ring(need, cp)
    return keys, gradients


# now route="mixed" and --cp-ring-route mixed name it
ROUTES["mixed"] = Route(keys_direct_gradients_ring)


def main(cp=4):
    n = 512
    plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp), route="mixed")
    # every key arrives before it is read, every gradient comes home once, nothing can deadlock
    plan.verify(rank_plans=True)

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32, requires_grad=True) for _ in range(3))

    def attend(group):
        parts = [
            plan.layout.shard(x.detach(), group.rank, dim=1).requires_grad_() for x in (q, k, v)
        ]
        ring_attention(*parts, group, plan=plan).square().sum().backward()
        return [x.grad for x in parts]

    gradients = [
        plan.layout.unshard(parts, dim=1) for parts in zip(*LocalRing(cp).run(attend), strict=True)
    ]
    F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).square().sum().backward()
    for mine, x in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
