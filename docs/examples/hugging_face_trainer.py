"""transformers' Trainer under context parallelism: the ranks of a group get the same batch, and each
takes its tokens. Run with torchrun --nproc-per-node 4.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cp_ring.integrations.transformers import shard_batch, use_ring_attention

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CP = 2


class RingTrainer(Trainer):
    """A Trainer on a mesh ("dp", "cp"). DDP averages gradients over all ranks, as `shard_batch`
    wants it.
    """

    def __init__(self, *args, mesh, **kwargs):
        super().__init__(*args, **kwargs)
        self.mesh, self.group = mesh, mesh["cp"].get_group()
        self.model_accepts_loss_kwargs = False  # shard_batch counts the labels
        use_ring_attention(self.model, self.group)

    def get_train_dataloader(self):
        # rows by data-parallel rank: Trainer's own loader would give each rank other ones
        dp = self.mesh["dp"]
        sampler = DistributedSampler(self.train_dataset, dp.size(), dp.get_local_rank())
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**shard_batch(inputs, self.group))
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def rows():
    """32 sequences that count upwards."""
    starts = torch.randint(64, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [torch.arange(start, start + 60) for start in starts]
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(group):
    """The loss of this rank's tokens in each step, averaged over all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = torch.arange(dist.get_world_size()).view(-1, CP)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=16, per_device_train_batch_size=2, learning_rate=3e-3,
            lr_scheduler_type="constant", logging_steps=1, report_to="none", disable_tqdm=True,
            save_strategy="no", use_cpu=device == "cpu",
        )  # fmt: skip
        trainer = RingTrainer(
            LlamaForCausalLM(LlamaConfig(**SIZES)),
            arguments,
            train_dataset=rows(),
            mesh=DeviceMesh(device, ranks, mesh_dim_names=("dp", "cp")),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert abs(losses[0] - first_loss()) < 1e-4 and losses[-1] < losses[0] - 0.5, losses
    return losses


def first_loss():
    """The loss of the first step by transformers' own attention, on one rank."""
    torch.manual_seed(1)
    model, data = LlamaForCausalLM(LlamaConfig(**SIZES)), rows()
    dp = dist.get_world_size() // CP
    dealt = [list(DistributedSampler(data, dp, rank))[:2] for rank in range(dp)]
    tokens = torch.stack([data[row]["input_ids"] for rows_of_rank in dealt for row in rows_of_rank])
    return model(tokens, labels=tokens).loss.item()


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print(f"losses {main(None)}")
    dist.destroy_process_group()
