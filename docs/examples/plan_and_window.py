"""A plan that is made once, proven, and used by every layer. Run with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_ring import Layout, Mask, Plan, ring_attention, shard, unshard

N, WINDOW = 1024, 100  # tokens; a query sees itself and 100 tokens before it


def main(group):
    cp = dist.get_world_size(group)
    plan = Plan.build(Mask.causal(N, window=(WINDOW, 0)), Layout.zigzag(N, cp))
    # raises PlanError where a pair is missed, computed twice, or its keys do not arrive
    report = plan.verify()
    if dist.get_rank(group) == 0:
        print(
            f"max / mean work {report.balance:.3f}; {report.share_of_full_ring:.1%} of a full "
            "ring's keys travel"
        )

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, N, 4, 32) for _ in range(3))
    q_part, k_part, v_part = (x.requires_grad_() for x in shard((q, k, v), plan, group))
    out = ring_attention(q_part, k_part, v_part, group, plan=plan)
    out.square().sum().backward()  # gradients of keys travel home to the rank that owns the keys

    position = torch.arange(N)
    offset = position[None, :] - position[:, None]  # key - query
    allowed = (offset <= 0) & (offset >= -WINDOW)
    whole = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=allowed)
    expected.square().sum().backward()
    for name, mine, want in (
        ("out", out.detach(), expected.detach()),
        *(
            (f"d{name}", x.grad, y.grad)
            for name, x, y in zip("qkv", (q_part, k_part, v_part), whole, strict=True)
        ),
    ):
        error = (unshard(mine, plan, group) - want.transpose(1, 2)).norm() / want.norm()
        assert error < 1e-5, f"{name}: {error}"
    return report.share_of_full_ring


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
