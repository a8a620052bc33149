"""A loop of plain torch as torchtitan has it: a mesh of data and context parallel ranks, FSDP2 over
both, and a model whose attention is one call. Run with torchrun --nproc-per-node 4.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import cp_ring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, VOCABULARY, WIDTH, HEADS, STEPS = 64, 64, 32, 4, 6


class Layer(nn.Module):
    def __init__(self, cp):
        super().__init__()
        self.norm, self.cp = nn.LayerNorm(WIDTH), cp
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1))
        q, k, v = (each.transpose(1, 2) for each in heads.chunk(3, 2))  # [b, h, s, d]
        out = cp_ring.ring_attention(q, k, v, self.cp, causal=True, qkv_format="bhsd")
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, cp):
        super().__init__()
        self.tokens, self.places = (nn.Embedding(size, WIDTH) for size in (VOCABULARY, TOKENS))
        self.layers = nn.ModuleList(Layer(cp) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch_of(step, dp_rank):
    """Two sequences that count upwards, the same on all ranks of a context-parallel group."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    start = torch.randint(VOCABULARY, (2, 1), generator=generator)
    tokens = (start + torch.arange(TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:], torch.arange(TOKENS).expand(2, -1)


def main(group):
    """The mean loss of each step, on dp x cp ranks, cp 2."""
    ranks = torch.arange(dist.get_world_size(group)).view(-1, 2)
    mesh = DeviceMesh(DEVICE, ranks, mesh_dim_names=("dp", "cp"))
    torch.manual_seed(1)
    model = Model(mesh["cp"].get_group()).to(DEVICE)
    both = mesh["dp", "cp"]._flatten("dp_cp")  # parameters are split over all ranks
    for layer in model.layers:
        fully_shard(layer, mesh=both)
    fully_shard(model, mesh=both)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for step in range(STEPS):
        batch = [x.to(DEVICE) for x in batch_of(step, mesh.get_local_rank("dp"))]
        tokens, labels, positions = cp_ring.shard(batch, None, mesh["cp"])
        logits = model(tokens, positions)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        losses.append(round(mean.item(), 5))
    assert losses[-1] < losses[0] - 0.5, losses
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    print(f"rank {dist.get_rank()}: losses {main(dist.group.WORLD)}")
    dist.destroy_process_group()
