"""A gated delta net over a prompt with four responses, packed once: states fork where responses
begin, on four ranks. Run: python docs/examples/forked_states.py
"""

import numpy as np
import torch
import torch.nn.functional as F

from cp_ring import Layout, prefix_pack, shard
from cp_ring.comm.states import StatePassing
from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.exchange.verify_chains import verify_chains
from cp_ring.testing.delta_rule import causal_conv1d, gated_delta_rule
from cp_ring.testing.local_ring import LocalRing

HEADS, CHANNELS, WIDTH = 2, 8, 4


def layer(x, weight, gates, convolve, rule):
    """A convolution of x [1, T, 3 h d], then the rule; gates are [1, T, h]."""
    mixed = convolve(lambda x, cu_seqlens: causal_conv1d(x, weight, cu_seqlens), x)
    q, k, v = mixed.unflatten(2, (3, HEADS, CHANNELS)).unbind(2)
    tensors = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": -gates.exp()}
    return rule(gated_delta_rule, beta=gates.sigmoid(), **tensors)


def alone(x, weight, gates):
    """The layer on one sequence by itself."""
    ends = torch.tensor([0, x.shape[1]])
    return layer(
        x, weight, gates,
        lambda convolution, x: convolution(x, ends),
        lambda rule, **tensors: rule(**tensors, cu_seqlens=ends)[0],
    )  # fmt: skip


def main(cp=4):
    draw = np.random.default_rng(0)
    prompt = draw.integers(100, size=40)
    pack = prefix_pack([np.append(prompt, draw.integers(100, size=9)) for _ in range(4)])
    n, mask = pack.mask.n, pack.mask
    layout = Layout.balanced(mask, cp)
    # states begin anew at position 0, and fork where branches of the mask do
    chains = Chains.of_mask(layout, mask)
    verify_chains(chains, WIDTH)

    torch.manual_seed(0)
    weight = torch.randn(3 * HEADS * CHANNELS, WIDTH).double()
    inputs = torch.randn(n, len(weight)).double(), torch.randn(n, HEADS).double()
    weights = pack.positions  # of the tokens in the loss

    def on_rank(group):
        mine = [x.clone().requires_grad_() for x in shard(inputs, layout, group, dim=0)]
        passing = StatePassing(chains, group, torch.device("cpu"))
        out = layer(
            mine[0][None], weight, mine[1][None],
            lambda convolution, x: passing.convolve(convolution, x, WIDTH), passing.delta_rule,
        )[0]  # fmt: skip
        loss = (out.sin().sum((1, 2)) * shard(weights, layout, group, dim=0)).sum()
        return out.detach(), *torch.autograd.grad(loss, mine)

    ranks = zip(*LocalRing(cp).run(on_rank), strict=True)
    out, *gradients = (layout.unshard(list(parts), dim=0) for parts in ranks)
    whole = [x.clone().requires_grad_() for x in inputs]
    loss, stored = 0, torch.zeros(n, dtype=torch.bool)
    for place in pack.indices:  # each sequence by itself; tokens that are stored once count once
        found = alone(whole[0][place][None], weight, whole[1][place][None])[0]
        torch.testing.assert_close(out[place], found.detach())
        new = ~stored[place]
        loss = loss + (found.sin().sum((1, 2)) * weights[place])[new].sum()
        stored[place] = True
    for ours, theirs in zip(gradients, torch.autograd.grad(loss, whole), strict=True):
        torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    main()
