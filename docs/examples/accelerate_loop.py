"""accelerate's loop with a language model of Hugging Face: accelerate averages gradients over all
ranks, of which neighbors share the tokens of a batch. Run with torchrun --nproc-per-node 4.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from cp_ring.integrations.transformers import shard_batch, use_ring_attention

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 6


def batch_of(step, dp_rank):
    """Two sequences that count upwards, the same on all ranks of a context-parallel group."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    start = torch.randint(64, (2, 1), generator=generator)
    tokens = (start + torch.arange(40)) % 64
    return {"input_ids": tokens, "labels": tokens}


def main(group):
    """The mean loss of each step, on dp x cp ranks, cp 2."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    ranks = torch.arange(accelerator.num_processes).view(-1, 2)
    mesh = DeviceMesh(accelerator.device.type, ranks, mesh_dim_names=("dp", "cp"))
    cp = mesh["cp"].get_group()
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    use_ring_attention(model, cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step, mesh.get_local_rank("dp"))
        batch = {name: x.to(accelerator.device) for name, x in batch.items()}
        loss = model(**shard_batch(batch, cp)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        losses.append(round(mean.item(), 5))
    assert losses[-1] < losses[0] - 0.5, losses
    return losses


if __name__ == "__main__":
    print(f"losses {main(None)}")
    dist.destroy_process_group()
