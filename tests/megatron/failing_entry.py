"""`cp_ring.pretrain_gpt`, whose forward step fails where FAILS says, and a program of its own with
`enable`, whose batches do; see `failing_script`.
"""

import os
import sys

PLACE, _, WHO = os.environ.get("FAILS", "").partition(":")


def fail():
    if WHO in ("all", os.environ["RANK"]):
        raise ValueError(f"my own bug in {PLACE}")


def main():
    if PLACE == "program":
        run_program()
        return
    from cp_ring import pretrain_gpt
    from cp_ring.megatron import gpt
    from cp_ring.megatron.adapter import compat

    forward_step, calls = gpt.forward_step, []

    def failing_step(data_iterator, model, *rest):
        calls.extend([1] * (compat.training_step() > 0))
        if len(calls) > 5:
            fail()
        return forward_step(data_iterator, model, *rest)

    gpt.forward_step = failing_step
    sys.argv[0] = "pretrain_gpt"
    pretrain_gpt.main()


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        if index > 4:
            fail()
        return torch.randn(32, 4, 16)


def run_program():
    """Attention over two ranks on batches of workers, as a program with `enable` has them."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.utils.data import DataLoader

    import cp_ring.megatron

    cp_ring.megatron.enable(cpu=True, certify="off", seq_length=128)
    from cp_ring.megatron.adapter.attention import RingDotProductAttention

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, context_parallel_size=2,
        attention_dropout=0.0, calculate_per_token_loss=True,
    )  # fmt: skip
    layer = RingDotProductAttention(config, 1, AttnMaskType.causal, "self")
    for rows in DataLoader(Rows(), batch_size=1, num_workers=2):
        x = rows.transpose(0, 1).requires_grad_()
        layer(x, x, x, None).sum().backward()
