"""transformers' Trainer under context parallelism: the ranks of a group get the same batch, and each
takes its tokens. Run with torchrun --nproc-per-node 4.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from cp_ring.integrations.transformers import RingTrainer

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CP = 2


def rows():
    """32 sequences that count upwards."""
    starts = torch.randint(64, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = [torch.arange(start, start + 60) for start in starts]
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(group):
    """The loss of each step, of all rows of the step, and that of the evaluation."""
    torch.manual_seed(1)
    model, data = LlamaForCausalLM(LlamaConfig(**SIZES)), rows()
    tokens = torch.stack([row["input_ids"] for row in data[:8]])
    before = model(tokens, labels=tokens).loss.item()  # by transformers' own attention, on one rank
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            per_device_eval_batch_size=4, learning_rate=6e-3, lr_scheduler_type="constant",
            logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = RingTrainer(
            model, arguments, train_dataset=data, eval_dataset=data[:8], context_parallel_size=CP
        )
        assert abs(trainer.evaluate()["eval_loss"] - before) < 1e-4
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert after < before - 0.3, (before, after, losses)
    return [*losses, after]


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    print(f"losses {main(None)}")
    dist.destroy_process_group()
