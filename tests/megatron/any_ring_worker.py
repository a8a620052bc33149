"""One of two ranks of programs whose attention is not cp_ring's class.

Rank 0 writes to FOLDER/found.json why each program is stopped, or what was probed.
"""

import json
import os
from functools import partial

import torch
import torch.distributed as dist

import cp_ring.megatron
from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.integrations import transformer_engine as te
from tests.certificate.faults import _averaged_by_rank
from tests.megatron.layers import configuration
from tests.megatron.worker import output_to, place

N = 64


def step(iterator, model, labels=None, normalized=None):
    """The forward step of a program; the two faults act at context parallel size 2 alone."""
    faulty = model.config.context_parallel_size > 1
    batch = cp_ring.megatron.split_batch(next(iterator))
    if faulty and labels:
        batch["labels"] = labels(batch["tokens"])

    def loss(losses):
        total, count = (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        found = total, count.int(), {"loss": torch.stack([total.detach(), count])}
        return normalized(*found) if faulty and normalized else found

    more = {name: batch[name] for name in ("labels", "packed_seq_params")}
    return model(batch["tokens"], batch["position_ids"], None, **more), loss


STEPS = {
    "right": step,
    "labels shifted after the split": partial(step, labels=lambda tokens: tokens.roll(-1, 1)),
    "loss normalized by local tokens": partial(step, normalized=_averaged_by_rank),
}
RINGS = {
    "positions of the wrong rank": {"believed": 0},
    "padded tail attended": {"tail": 1},
    "last token of a padded document lost": {"tail": -1},
}
BENEATH = {
    "right": lambda named: {},
    "window side swapped": lambda named: {"window_size": named["window_size"][::-1]},
    "sink of another head": lambda named: {"sink": named["sink"].roll(1)},
}


def examined(core, step, packed=False, **more):
    from megatron.core.models.gpt import GPTModel

    from tests.certificate.specs import with_core

    config = configuration(
        hidden_size=64, num_query_groups=2, context_parallel_size=2, calculate_per_token_loss=True,
        masked_softmax_fusion=False, window_size=(15, 0), window_attn_skip_freq=2, **more,
    )  # fmt: skip
    build = partial(
        GPTModel, transformer_layer_spec=with_core(core), vocab_size=256, max_sequence_length=N,
        position_embedding_type="rope",
    )  # fmt: skip
    try:
        made = cp_ring.megatron.certify(config, build, step, seq_length=N, packed=packed)
    except ConfigError as error:
        return str(error)
    return [probe.name for probe in made.probes] + made.not_covered


def main(folder):
    """What a rank does once the process group exists."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.certificate.stand_in import StandInRing, faulty
    from tests.programs import beneath

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    found = {name: examined(StandInRing, each) for name, each in STEPS.items()}
    found |= {f"packed, {name}": examined(StandInRing, each, True) for name, each in STEPS.items()}
    found |= {name: examined(faulty(**fault), step, True) for name, fault in RINGS.items()}
    beneath.install()
    right = te.ring_attention
    for name, change in BENEATH.items():
        te.ring_attention = lambda *x, change=change, **named: right(*x, **named | change(named))
        found[f"beneath, {name}"] = examined(
            beneath.TEDotProductAttention, step, softmax_type="learnable"
        )
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def rank(number, ranks, port, folder, log):
    """As `tests.megatron.worker.rank`."""
    os.environ |= place(number, ranks, port)
    output_to(log)
    patches.get("cpu_runtime").apply()
    dist.init_process_group("gloo")
    main(folder)
    dist.destroy_process_group()
