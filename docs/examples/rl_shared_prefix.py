"""Reinforcement learning on a prompt and 8 responses that share it, in Megatron. Run with torchrun
--nproc-per-node 2.

The prompt is stored and computed once. Loss and gradients are those of 8 separate sequences.
"""

import torch
import torch.distributed as dist

from cp_ring import Options, patches, prefix_pack
from cp_ring.megatron import settings, with_ring_attention

for name in ("cpu_runtime", "rotary_layout"):  # the first only where there is no CUDA
    patches.get(name).apply()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from cp_ring.megatron.batches import split_batch  # noqa: E402

VOCAB, PROMPT, RESPONSE, RESPONSES = 64, 97, 32, 8
MULTIPLE = 8  # the ranks divide the length of the stream


def rollouts():
    """One prompt [PROMPT], responses [RESPONSES, RESPONSE], and the advantage of each, normalized
    over the group as in GRPO.
    """
    draw = torch.Generator().manual_seed(1)
    rewards = torch.rand(RESPONSES, generator=draw)
    prompt, responses = (
        torch.randint(VOCAB, size, generator=draw) for size in ((PROMPT,), (RESPONSES, RESPONSE))
    )
    return prompt, responses, (rewards - rewards.mean()) / rewards.std()


def shared():
    """All responses in one batch row behind their prompt."""
    prompt, responses, advantages = rollouts()
    pack = prefix_pack(
        [torch.cat([prompt, response]) for response in responses], PROMPT, advantages, MULTIPLE
    )
    batch = {
        "tokens": pack.tokens,
        "labels": pack.labels.clamp(min=0),  # the loss mask leaves out tokens without a label
        "loss_mask": pack.loss_mask,
        "position_ids": pack.positions,
    }
    return {key: value[None] for key, value in batch.items()} | {"cp_ring_mask": pack.mask}


def separate():
    """Each response in a batch row of its own, behind a copy of the prompt."""
    prompt, responses, advantages = rollouts()
    whole = torch.cat([prompt.expand(RESPONSES, -1), responses], 1)
    labels, tokens = whole[:, 1:].contiguous(), whole[:, :-1].contiguous()
    weights = torch.zeros_like(tokens, dtype=torch.float32)
    weights[:, PROMPT - 1 :] = advantages[:, None]
    positions = torch.arange(tokens.shape[1]).expand(RESPONSES, -1)
    return {"tokens": tokens, "labels": labels, "loss_mask": weights, "position_ids": positions}


def build():
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, masked_softmax_fusion=False, init_method_std=0.1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )  # fmt: skip
    spec = with_ring_attention(get_gpt_layer_local_spec())
    return GPTModel(config, spec, VOCAB, 1024, position_embedding_type="rope")


def loss_and_gradients(model, batch):
    """The policy gradient's loss, the sum over ranks, and the gradients of all parameters."""
    part = split_batch(batch)
    losses = model(
        part["tokens"],
        part["position_ids"],
        None,
        labels=part["labels"],
        packed_seq_params=part["packed_seq_params"],
    )
    loss = (losses * part["loss_mask"]).sum() / (RESPONSES * RESPONSE)
    model.zero_grad()
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for tensor in found:  # every rank has the loss of its tokens, and its share of the gradients
        dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    return found


def main():
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    settings.configure(Options(enabled=True, layout="balanced", mask_kinds="tree,causal"))
    model = build()
    ours, plain = shared(), separate()
    found, expected = (
        [x.clone() for x in loss_and_gradients(model, batch)] for batch in (ours, plain)
    )
    parallel_state.destroy_model_parallel()
    worst = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    assert worst < 1e-5, worst
    tokens = ours["tokens"].numel(), plain["tokens"].numel()
    if dist.get_rank() == 0:
        print(
            f"{tokens[0]:,} tokens instead of {tokens[1]:,}, {1 - tokens[0] / tokens[1]:.0%} saved"
        )
        print(
            f"loss {float(found[0]):.4f}; largest relative error of loss and gradients: {worst:.1e}"
        )
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
