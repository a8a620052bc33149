"""Ring attention on two CPU ranks. Run it by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cp_ring


def main(group):
    torch.manual_seed(0)  # every rank draws the same whole tensors
    q, k, v = (torch.randn(1, 1024, heads, 64) for heads in (8, 2, 2))

    shards = cp_ring.shard((q, k, v), group=group)  # this rank's half, in zigzag
    out = cp_ring.ring_attention(*shards, group, causal=True)

    # to compare with PyTorch's; training needs none of this
    whole = cp_ring.unshard(out, group=group).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    error = (whole - expected).norm() / expected.norm()
    print(f"rank {dist.get_rank(group)}: {out.shape[1]} tokens, relative error {error:.1e}")
    assert error < 1e-6
    return float(error)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
