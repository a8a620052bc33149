"""A Megatron layer spec with ring attention, without a command line or a GPU. Run: python
docs/examples/megatron_layer.py
"""

import torch
import torch.distributed as dist

from cp_ring import patches
from cp_ring.megatron import with_ring_attention

patches.get("cpu_runtime").apply()  # only where there is no CUDA: Megatron then runs on the CPU

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()  # in a job of more ranks: context_parallel_size=...
    model_parallel_cuda_manual_seed(1)
    try:
        return compare()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def compare():
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    stock, ring = (build_module(kind, config=config) for kind in (spec, with_ring_attention(spec)))
    # ring attention has the same parameters as the stock layer
    ring.load_state_dict(stock.state_dict())

    x = torch.randn(32, 2, 64)  # [s, b, hidden]
    # the stock layer takes a mask tensor; ring attention declares its mask
    hidden = torch.ones(1, 1, 32, 32).triu(1).bool()
    expected, _ = stock(x, attention_mask=hidden)
    out, _ = ring(x, attention_mask=None)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    return type(ring.self_attention.core_attention).__name__


if __name__ == "__main__":
    print(main())
