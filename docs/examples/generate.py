"""Tokens of a model that is split over ranks, greedy and sampled, and their log-likelihoods.

Run with torchrun --nproc-per-node 2.
"""

import torch
import torch.distributed as dist

import cp_ring
import cp_ring.megatron

# cpu=True only where there is no CUDA; nothing is trained here, so there is no certificate
cp_ring.megatron.enable(cpu=True, certify="off")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCAB, PROMPT, COUNT = 64, 21, 11
N = PROMPT + COUNT


def build(cp):
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
        context_parallel_size=cp, use_cpu_initialization=True, masked_softmax_fusion=False, init_method_std=0.3,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, N, position_embedding_type="rope")


def sample(logits):
    """The next token of each batch row; what the first rank of a group draws counts."""
    return torch.multinomial((logits / 0.7).softmax(-1), 1)[:, 0]


def likelihoods(model, tokens):
    """Of each batch row, the log-likelihood of what follows its prompt."""
    labels = tokens.roll(-1, 1)
    labels[:, : PROMPT - 1] = labels[:, -1] = -100  # no labels
    places = torch.arange(N).expand_as(tokens)
    mine = cp_ring.megatron.split_batch(
        {"tokens": tokens, "labels": labels, "position_ids": places}
    )
    packed = mine["packed_seq_params"]
    logits = model(
        mine["tokens"], mine["position_ids"], None, packed_seq_params=packed,
        runtime_gather_output=True,
    )  # fmt: skip
    total = cp_ring.logprobs(logits, mine["labels"]).sum(1)
    if model.config.context_parallel_size > 1:
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


@torch.no_grad()
def main(model):
    """Greedy and sampled tokens, and the log-likelihoods of the greedy ones."""
    model.eval()
    prompts = torch.randint(VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(9))
    greedy = cp_ring.megatron.generate(model, prompts, COUNT)
    sampled = cp_ring.megatron.generate(model, prompts, COUNT, sample)
    return greedy, sampled, likelihoods(model, greedy)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    greedy, _, total = main(build(2))
    if dist.get_rank() == 0:
        print("greedy:", greedy[:, PROMPT:].tolist(), "log-likelihoods:", total.tolist())
    dist.destroy_process_group()
