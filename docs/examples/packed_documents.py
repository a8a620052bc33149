"""Training on packed documents: shard, attend, roll the labels, one loss. Run with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_ring import Layout, Mask, RingPlan, ring_attention, roll, shard

VOCAB, HEADS, SIZE = 50, 4, 16
CU_SEQLENS = [0, 300, 301, 420, 512]  # four documents of 300, 1, 119 and 92 tokens: no padding


def loss_of(weights, tokens, group, plan):
    """Mean loss of all tokens that have a next token in their document. `group` None is one rank that holds all tokens."""
    table, projection = weights
    positions = torch.arange(tokens.shape[1])[None]
    tokens, positions = shard((tokens, positions), plan, group)
    x = table[tokens]  # [1, s, HEADS * SIZE]
    q, k, v = (x @ projection).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
    x = x + ring_attention(q, k, v, group, plan=plan).flatten(2)

    labels = roll(tokens, -1, plan, group)  # the next token, which may be on another rank
    last = torch.isin(positions, torch.tensor(CU_SEQLENS[1:]) - 1)  # the last token of a document predicts nothing
    losses = F.cross_entropy((x @ table.T)[0], labels[0], reduction="none")[~last[0]]
    total = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    if group is not None:  # divide by the number of tokens of all ranks, not of this one: a mean of means would be wrong
        counts = total.detach().clone()
        dist.all_reduce(counts, group=group)
        return total[0] / counts[1], counts[0] / counts[1]
    return total[0] / total[1], (total[0] / total[1]).detach()


def main(group):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (1, CU_SEQLENS[-1]))
    weights = [torch.randn(VOCAB, HEADS * SIZE).mul(0.3).requires_grad_(), torch.randn(HEADS * SIZE, 3 * HEADS * SIZE).mul(0.1)]
    weights[1].requires_grad_()
    seen = []
    for ranks in (group, None):
        cp = 1 if ranks is None else dist.get_world_size(ranks)
        mask = Mask.documents(CU_SEQLENS)
        plan = RingPlan.build(mask, Layout.balanced(mask, cp))
        loss, shown = loss_of(weights, tokens, ranks, plan)
        gradients = torch.autograd.grad(loss, weights)
        if ranks is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=ranks)  # weights are replicated over the ring: their gradients add up
        seen.append((shown, *gradients))
    for ring, one in zip(*seen, strict=True):
        torch.testing.assert_close(ring, one, rtol=1e-4, atol=1e-6)
    return float(seen[0][0])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: loss {main(dist.group.WORLD):.6f}")
    dist.destroy_process_group()
