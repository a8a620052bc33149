"""A training loop on megatron.core without Megatron's arguments: cp 2 x dp 2.

Run with torchrun --nproc-per-node 4.
"""

import torch
import torch.distributed as dist

import cp_ring.megatron

# cpu=True only where there is no CUDA
cp_ring.megatron.enable(cpu=True, seq_length=128, micro_batch_size=2)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCAB, N, MICRO, GLOBAL, STEPS = 256, 128, 2, 8, 4


def build(config):
    """The model; its layer specification is a stock one, whose core attention becomes ring
    attention.
    """
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, N, position_embedding_type="rope")


def forward_step(iterator, model):
    """The losses of this rank's tokens, and the function that adds them up. All ranks of a group
    read the same batch rows.
    """
    batch = cp_ring.megatron.split_batch(next(iterator))  # keeps this rank's tokens
    mask, more = batch["loss_mask"], {name: batch[name] for name in ("labels", "packed_seq_params")}

    def loss(losses):
        total, count = (losses * mask).sum(), mask.sum()
        return total, count.int(), {"loss": torch.stack([total.detach(), count])}

    return model(batch["tokens"], batch["position_ids"], None, **more), loss


def batches(step, rank, ranks):
    """The microbatches of data-parallel rank `rank`; the global batch is the same at any cp."""
    tokens = (
        torch.randint(VOCAB, (GLOBAL, N + 1), generator=torch.Generator().manual_seed(step))
        .sort(1)
        .values
    )
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(N).expand(GLOBAL, N),
    }
    whole["loss_mask"] = (tokens[:, 1:] % 7 > 0).float()
    return [
        {name: x[i : i + MICRO] for name, x in whole.items()}
        for i in range(rank * MICRO, GLOBAL, ranks * MICRO)
    ]


def main(cp=2):
    """The loss of each step over all tokens that count."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        context_parallel_size=cp, calculate_per_token_loss=True, use_cpu_initialization=True, masked_softmax_fusion=False,
    )  # fmt: skip
    data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    # raises where attention, the split, the loss or the first microbatch is wrong
    cp_ring.megatron.certify(config, build, forward_step, batches(0, *data)[0])
    torch.manual_seed(1)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), build(config)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), [model]
    )
    config.finalize_model_grads_func = finalize_model_grads
    losses = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        mine = batches(step, *data)
        sizes = {
            "num_microbatches": len(mine),
            "seq_length": N,
            "micro_batch_size": MICRO,
            "forward_only": False,
        }
        run = get_forward_backward_func()
        reports = run(
            forward_step_func=forward_step, data_iterator=iter(mine), model=[model], **sizes
        )
        optimizer.step()
        total = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        losses.append(float(total[0] / total[1]))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = main()
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
