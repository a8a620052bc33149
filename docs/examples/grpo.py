"""GRPO on 4 CPU ranks: context parallel size 2, data parallel size 2. Run with torchrun
--nproc-per-node 4.

Each data-parallel rank has a prompt and 6 responses with random rewards. The prompt, and what
responses begin with in common, is stored once. Weights after 5 steps are those of one rank.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cp_ring import Layout, Plan, prefix_pack, ring_attention, shard, unshard

VOCAB, HEADS, SIZE, PROMPT, RESPONSES, STEPS, CLIP = 50, 4, 16, 40, 6, 5, 0.2


def rollouts(number):
    """A prompt with responses of several lengths, and the advantages of these, as in GRPO."""
    draw = torch.Generator().manual_seed(number)
    prompt = torch.randint(VOCAB, (PROMPT,), generator=draw).tolist()
    lengths = torch.randint(5, 20, (RESPONSES,), generator=draw).tolist()
    responses = [torch.randint(3, (length,), generator=draw).tolist() for length in lengths]
    rewards = torch.rand(RESPONSES, generator=draw)
    return [prompt + response for response in responses], (rewards - rewards.mean()) / rewards.std()


def responses_logprobs(weights, sequences, cp):
    """The log-probabilities of each response's tokens, on every rank of `cp`; None is one rank."""
    table, places, projection = weights
    pack = prefix_pack(sequences)
    plan = Plan.build(pack.mask, Layout.balanced(pack.mask, cp.size() if cp else 1))
    tokens, positions, labels = shard((pack.tokens, pack.positions, pack.labels), plan, cp, dim=0)
    x = table[tokens] + places[positions]
    q, k, v = (x @ projection)[None].unflatten(-1, (3, HEADS, SIZE)).unbind(2)
    x = x + ring_attention(q, k, v, cp, plan=plan)[0].flatten(1)
    logprobs = -cross_entropy(x @ table.T, labels, reduction="none")  # 0 without a label
    found = unshard(logprobs, plan, cp, dim=0)
    # from the prompt's last token on, each token but the last predicts one of the response
    return [found[index[PROMPT - 1 : -1]] for index in pack.indices]


def loss_of(weights, before, number, cp):
    """The clipped loss of a prompt's responses, the mean over their tokens."""
    sequences, advantages = rollouts(number)
    with torch.no_grad():
        old = torch.cat(responses_logprobs(before, sequences, cp))
    new = responses_logprobs(weights, sequences, cp)
    advantage = advantages.repeat_interleave(torch.tensor([len(x) for x in new]))
    ratio = (torch.cat(new) - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def train(cp, dp):
    draw = torch.Generator().manual_seed(0)
    shapes = (VOCAB, HEADS * SIZE), (PROMPT + 20, HEADS * SIZE), (HEADS * SIZE, 3 * HEADS * SIZE)
    weights = [torch.randn(x, generator=draw).mul(0.1).requires_grad_() for x in shapes]
    before = [x.detach().clone() for x in weights]  # the policy that has sampled
    mine = [dp.get_local_rank()] if dp else [0, 1]  # prompts of a step
    for step in range(STEPS):
        loss = sum(loss_of(weights, before, 2 * step + number, cp) for number in mine) / 2
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            if cp:  # each rank has its share
                dist.all_reduce(gradient)
            weight.data -= 2.0 * gradient
    return weights


def main(_group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found, expected = train(mesh["cp"], mesh["dp"]), train(None, None)
    worst = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    assert worst < 1e-5, worst
    return [x.tolist() for x in found]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
