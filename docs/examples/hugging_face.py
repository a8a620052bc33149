"""A language model of Hugging Face transformers on long sequences: cp ranks share a batch, and
FSDP2 shares the parameters over the same ranks. Run with torchrun --nproc-per-node 2.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from cp_ring.integrations.transformers import shard_batch, use_ring_attention

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 4


def sequences(step):
    """Four sequences that count upwards, the same on all ranks of a context-parallel group."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(64, (4,), generator=generator).tolist()
    return [
        {"input_ids": list(range(start, start + length))}
        for start, length in zip(starts, (60, 7, 33, 21), strict=True)
    ]


def main(group):
    """The mean loss of each step."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    use_ring_attention(model, group)
    mesh = DeviceMesh.from_group(group, "cuda" if torch.cuda.is_available() else "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pack = DataCollatorWithFlattening(return_tensors="pt")  # one batch row of documents
    losses = []
    for step in range(STEPS):
        batch = shard_batch(pack(sequences(step)), group)  # this rank's tokens
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        losses.append(round(mean.item(), 5))
    assert losses[-1] < losses[0] - 0.5, losses
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print(f"rank {dist.get_rank()}: losses {main(dist.group.WORLD)}")
    dist.destroy_process_group()
