"""Ring attention on two CPU ranks, without a plan. Run it by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cp_ring


def main(group):
    # Every rank draws the same whole tensors: 1 sequence, 1024 tokens, heads of 64.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1024, heads, 64) for heads in (8, 2, 2))

    # This rank's half of the tokens: in zigzag, each rank has as much causal work.
    shards = cp_ring.shard((q, k, v), group=group)
    out = cp_ring.ring_attention(*shards, group, causal=True)

    # The whole output again, to compare it with PyTorch's; training needs none of this.
    whole = cp_ring.unshard(out, group=group)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = F.scaled_dot_product_attention
    expected = sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    error = (whole - expected).norm() / expected.norm()
    tokens = f"{out.shape[1]} of {whole.shape[1]} tokens"
    print(f"rank {dist.get_rank(group)}: {tokens}, relative error {error:.1e}")
    assert error < 1e-6
    return float(error)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
