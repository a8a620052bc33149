"""Mamba and gated delta net layers alone, with whole batch rows on one rank."""

import numpy as np
import torch

N, ROWS, HIDDEN = 64, 2, 32
DETERMINISTIC = False
OFFSETS = np.array([0, 5, 30, 64, 100, 101, 128])  # of documents in the stream of two batch rows


def configuration():
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.adapter import compat

    sizes = {
        "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    }  # fmt: skip
    return TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True,
        add_bias_linear=False, deterministic_mode=DETERMINISTIC,
        activation_func=torch.nn.functional.silu, **compat.known_arguments(TransformerConfig, sizes),
    )  # fmt: skip


def build(kind):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_net as package
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.parity import recurrent  # noqa: F401
    from tests.parity.specs import Norm

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    if kind == "mamba":
        return MambaMixer(
            configuration(),
            MambaMixerSubmodules(**linear),
            HIDDEN,
            layer_number=1,
            pg_collection=groups,
        )
    submodules = package.GatedDeltaNetSubmodules(**linear, out_norm=Norm)
    return package.GatedDeltaNet(configuration(), submodules, layer_number=1, pg_collection=groups)


def whole_rows():
    """Hidden states [N, ROWS, HIDDEN]."""
    return torch.randn(N, ROWS, HIDDEN, generator=torch.Generator().manual_seed(9))


def call(layer, hidden, packed):
    """Output [s, b, HIDDEN] of hidden states [s, b, HIDDEN]."""
    mask = {} if "MambaMixer" in type(layer).__name__ else {"attention_mask": None}
    return layer(hidden, packed_seq_params=packed, **mask)[0]
