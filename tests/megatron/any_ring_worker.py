"""One of two ranks of programs whose attention is not cp_ring's class: `any_ring_worker.py FOLDER`.

Rank 0 writes to FOLDER/found.json why each program is stopped, and "" for the right ones.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import cp_ring.megatron
from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.integrations import transformer_engine as te

N = 64


def model_of(attention):
    """What builds a model with this core attention."""
    from megatron.core.models.gpt import GPTModel

    from tests.certificate.specs import with_core

    return lambda config: GPTModel(
        config, with_core(attention), 256, N, position_embedding_type="rope"
    )


def same(batch):
    return batch


def of_sums(loss, count):
    return loss, count.int(), {"loss": torch.stack([loss.detach(), count])}


def of_local_means(loss, count):
    """The loss is normalized by the tokens of this rank."""
    _, _, report = of_sums(loss, count)
    return loss / count.clamp(min=1), torch.ones((), dtype=torch.int), report


def labels_shifted(batch):
    """Labels are made of the tokens of this rank, after the split."""
    return batch | {"labels": batch["tokens"].roll(-1, 1)}


def step_of(change=same, loss_of=of_sums):
    """The forward step of a program, wrong at context parallel size 2 alone."""

    def step(iterator, model):
        alone = model.config.context_parallel_size == 1
        batch = cp_ring.megatron.split_batch(next(iterator))
        batch = batch if alone else change(batch)
        mask, more = (
            batch["loss_mask"],
            {name: batch[name] for name in ("labels", "packed_seq_params")},
        )

        def loss(losses):
            return (of_sums if alone else loss_of)((losses * mask).sum(), mask.sum())

        return model(batch["tokens"], batch["position_ids"], None, **more), loss

    return step


def examined(attention, step, **program):
    """Why this program is stopped; the names of its probes if it is not."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, context_parallel_size=2, use_cpu_initialization=True,
        calculate_per_token_loss=True, masked_softmax_fusion=False, window_size=(15, 0),
        window_attn_skip_freq=2, softmax_type="learnable",
    )  # fmt: skip
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            made = cp_ring.megatron.certify(
                config, model_of(attention), step, seq_length=N, **program
            )
    except ConfigError as error:
        return str(error)
    return {"probes": sorted({probe.name for probe in made.probes}), "gaps": made.not_covered}


@contextlib.contextmanager
def called_with(change):
    """The ring beneath gets other arguments."""
    right = te.ring_attention
    te.ring_attention = lambda *given, **named: right(*given, **named | change(named))
    try:
        yield
    finally:
        te.ring_attention = right


BENEATH = {
    "": same,
    "window side swapped": lambda named: {
        "window_size": named["window_size"][::-1],
        "causal": False,
    },
    "sink of another head": lambda named: {"sink": named["sink"].roll(1)},
}


def main(folder):
    """What a rank does once the process group exists."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.certificate.stand_in import StandInRing, faulty
    from tests.programs import beneath

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    found = {}
    for kind in ("rows", "packed"):
        sizes = {"packed": kind == "packed", "micro_batch_size": 1 if kind == "packed" else 2}
        found[f"{kind}, right"] = examined(StandInRing, step_of(), **sizes)
        for fault in StandInRing.FAULTS:
            found[f"{kind}, {fault}"] = examined(faulty(fault), step_of(), **sizes)
        steps = {
            "labels shifted after the split": step_of(labels_shifted),
            "loss normalized by local tokens": step_of(loss_of=of_local_means),
        }
        for fault, step in steps.items():
            found[f"{kind}, {fault}"] = examined(StandInRing, step, **sizes)
    beneath.install()
    for fault, change in BENEATH.items():
        with called_with(change):
            found[f"beneath, {fault or 'right'}"] = examined(
                beneath.TEDotProductAttention, step_of()
            )
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    patches.get("cpu_runtime").apply()
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
