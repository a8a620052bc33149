"""Images inside text, in Megatron: tokens of an image see one another. Run with torchrun
--nproc-per-node 2.

Loss and gradients are those of stock Megatron on one rank with the dense mask.
"""

import torch
import torch.distributed as dist

from cp_ring import Mask, Options, patches
from cp_ring.megatron import settings, with_ring_attention

for name in ("cpu_runtime", "rotary_layout"):  # the first only where there is no CUDA
    patches.get(name).apply()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from cp_ring.megatron.batches import split_batch  # noqa: E402

VOCAB, LENGTH = 64, 256
# of two batch rows; no span needs to begin or end where a rank's tokens do
IMAGES = [[(16, 80), (130, 194)], [(100, 164)]]


def microbatch():
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (len(IMAGES), LENGTH + 1), generator=draw)
    weights = torch.ones(len(IMAGES), LENGTH)
    for text, spans in zip(weights, IMAGES, strict=True):
        for start, end in spans:
            text[start:end] = 0  # patches of an image are not predicted
    return {
        "tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": weights,
        "position_ids": torch.arange(LENGTH).expand(len(IMAGES), -1),
        "cp_ring_mask": [Mask.images(LENGTH, spans) for spans in IMAGES],
    }  # fmt: skip


def build(spec):
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, masked_softmax_fusion=False, init_method_std=0.1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )  # fmt: skip
    return GPTModel(config, spec, VOCAB, LENGTH, position_embedding_type="rope")


def loss_and_gradients(model, part, dense=None):
    packed = {"packed_seq_params": part["packed_seq_params"]} if dense is None else {}
    losses = model(part["tokens"], part["position_ids"], dense, labels=part["labels"], **packed)
    loss = (losses * part["loss_mask"]).sum()
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for tensor in found:
        dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    return found


def main():
    batch = microbatch()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    settings.configure(Options(enabled=True, layout="balanced", mask_kinds="images"))
    found = loss_and_gradients(
        build(with_ring_attention(get_gpt_layer_local_spec())), split_batch(batch)
    )
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel()  # each rank holds all tokens
    settings.configure(Options(enabled=True))
    hidden = torch.stack([~torch.from_numpy(mask.dense()) for mask in batch["cp_ring_mask"]])[
        :, None
    ]
    expected = loss_and_gradients(build(get_gpt_layer_local_spec()), batch, hidden)
    parallel_state.destroy_model_parallel()
    worst = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    assert worst < 1e-5, worst
    if dist.get_rank() == 0:
        print(
            f"loss {float(found[0]):.4f}; largest relative error of loss and gradients: {worst:.1e}"
        )
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
