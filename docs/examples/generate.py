"""Tokens of a model that is split over ranks, greedy and sampled, and their log-likelihoods.

Run with torchrun --nproc-per-node 2.
"""

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

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


def likelihoods(model, requests):
    """Of each pair of a context and its continuation, lists of tokens: the log-likelihood of the
    continuation, and how many of its tokens are not the likeliest; as evaluation harnesses ask.
    """
    cp = model.config.context_parallel_size
    tokens = pad_sequence([torch.tensor([*x, *y]) for x, y in requests], batch_first=True)
    tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % (2 * cp)))
    labels = torch.full_like(tokens, -100)  # no label
    for row, (context, continuation) in enumerate(requests):
        first = len(context) - 1
        labels[row, first : first + len(continuation)] = torch.tensor(continuation)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    mine = cp_ring.megatron.split_batch(
        {"tokens": tokens, "labels": labels, "position_ids": places}
    )
    packed, labels = mine["packed_seq_params"], mine["labels"]
    logits = model(
        mine["tokens"], mine["position_ids"], None, packed_seq_params=packed,
        runtime_gather_output=True,
    )  # fmt: skip
    others = (labels >= 0) & (logits.argmax(-1) != labels)
    found = torch.stack([cp_ring.logprobs(logits, labels).sum(1), others.sum(1)])
    if cp > 1:  # each rank has its tokens
        dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
    return found


@torch.no_grad()
def main(model):
    """Greedy and sampled tokens, and their log-likelihoods."""
    model.eval()
    prompts = torch.randint(VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(9))
    greedy = cp_ring.megatron.generate(model, prompts, COUNT)
    sampled = cp_ring.megatron.generate(model, prompts, COUNT, sample)
    requests = [(row[:PROMPT], row[PROMPT:]) for row in (*greedy.tolist(), *sampled.tolist())]
    requests[1] = requests[1][0], requests[1][1][:4]  # of any length
    return greedy, sampled, likelihoods(model, requests)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    greedy, _, found = main(build(2))
    if dist.get_rank() == 0:
        print("greedy:", greedy[:, PROMPT:].tolist(), "log-likelihoods:", found[0].tolist())
    dist.destroy_process_group()
