"""Training on packed documents: shard, attend, roll the labels, one loss. Run with torchrun
--nproc-per-node 2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_ring import Layout, Mask, Plan, ring_attention, roll, shard

VOCAB, HEADS, SIZE = 50, 4, 16
CU_SEQLENS = [0, 300, 301, 420, 512]  # four documents of 300, 1, 119 and 92 tokens: no padding


def loss_of(weights, tokens, group, plan):
    """This rank's share of the mean loss, and the mean loss to show. `group` None is one rank that
    holds all tokens.
    """
    table, projection = weights
    tokens = shard(tokens, plan, group)
    x = table[tokens]  # [1, s, HEADS * SIZE]
    q, k, v = (x @ projection).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
    x = x + ring_attention(q, k, v, group, plan=plan).flatten(2)

    # The next token may be on another rank. The last token of a document has none: its label is
    # -100, which counts for nothing.
    labels = roll(tokens, -1, plan, group, cu_seqlens=CU_SEQLENS, fill=-100)
    total = F.cross_entropy((x @ table.T)[0], labels[0], ignore_index=-100, reduction="sum")
    sums = torch.stack([total.detach(), (labels != -100).sum()])
    if group is not None:
        # divide by the tokens of all ranks: a mean of the ranks' means would be wrong
        dist.all_reduce(sums, group=group)
    return total / sums[1], sums[0] / sums[1]


def main(group):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (1, CU_SEQLENS[-1]))
    weights = [
        torch.randn(VOCAB, HEADS * SIZE).mul(0.3).requires_grad_(),
        torch.randn(HEADS * SIZE, 3 * HEADS * SIZE).mul(0.1),
    ]
    weights[1].requires_grad_()
    seen = []
    for ranks in (group, None):
        cp = 1 if ranks is None else dist.get_world_size(ranks)
        mask = Mask.documents(CU_SEQLENS)
        plan = Plan.build(mask, Layout.balanced(mask, cp))
        loss, shown = loss_of(weights, tokens, ranks, plan)
        gradients = torch.autograd.grad(loss, weights)
        if ranks is not None:
            for gradient in gradients:
                # weights are replicated over the ring: their gradients add up
                dist.all_reduce(gradient, group=ranks)
        seen.append((shown, *gradients))
    for ring, one in zip(*seen, strict=True):
        torch.testing.assert_close(ring, one, rtol=1e-4, atol=1e-6)
    return float(seen[0][0])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: loss {main(dist.group.WORLD):.6f}")
    dist.destroy_process_group()
