"""One of four ranks of a program on megatron.core alone, whose attention `enable` replaced. Rank 0
writes what they find to found.json.
"""

import contextlib
import io
import json
import os

import torch
import torch.distributed as dist

from cp_ring.megatron.wrapping import replaced
from tests.megatron import layers, worker


def main(folder):
    """What a rank does once the process group exists."""
    import megatron.core
    from megatron.core import parallel_state

    import cp_ring.megatron
    from docs.examples import megatron_core as example

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        cp_2 = example.main(2)
    found = {
        "version": megatron.core.__version__,
        "cp 2": cp_2,
        "printed": text.getvalue(),
    }
    config = configuration(2)
    found["wrong split"] = rejection(
        lambda: cp_ring.megatron.certify(config, example.build, spoiled(example, wrong_split))
    )
    batch = example.batches(0, 0, 1)[0]
    found["wrong labels"] = rejection(
        lambda: cp_ring.megatron.certify(
            config, example.build, example.forward_step, batch | {"labels": batch["tokens"]}
        )
    )
    found |= packed_documents(example)
    model = example.build(config)
    found["whole rows"] = rejection(lambda: whole_rows(model))
    cp_ring.megatron.enable(cpu=True, layout="balanced", seq_length=128, micro_batch_size=2)
    found["other layout"] = rejection(lambda: example.forward_step(iter([batch]), model))
    cp_ring.megatron.enable(cpu=True, seq_length=128, micro_batch_size=2)
    example.forward_step(iter([batch]), model)
    parallel_state.destroy_model_parallel()
    found["cp 1"] = example.main(1)
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def packed_documents(example):
    """Certificates of packed documents; with a wrong split too."""
    import cp_ring.megatron

    found = {}
    cp_ring.megatron.enable(cpu=True, seq_length=128, packed=True)
    initialized = []

    def build(config):
        initialized.append(config.perform_initialization and config.no_sync_func is None)
        with replaced((example, "VOCAB", 48)):  # fewer tokens than the probes draw
            return example.build(config)

    loads_weights = configuration(2, perform_initialization=False)
    loads_weights.no_sync_func = contextlib.nullcontext  # of a model that is there already
    with torch.inference_mode():  # which the probes leave
        certificate = cp_ring.megatron.certify(loads_weights, build, example.forward_step)
    found["packed"] = covered(certificate)
    found["initialized"] = initialized
    for name, step in {
        "wrong packed": spoiled(example, wrong_split),
        "documents dropped": spoiled(example, without_documents),
        "no gradients": without_gradients(example),
    }.items():
        found[name] = rejection(
            lambda step=step: cp_ring.megatron.certify(configuration(2), example.build, step)
        )
    cp_ring.megatron.enable(cpu=True, seq_length=128, micro_batch_size=2)
    return found


def covered(certificate):
    """What of the loss was covered, and what was not."""
    models = {
        f"{probe.layer} under {probe.mask}"
        for probe in certificate.probes
        if probe.layer.startswith("tiny")
    }
    return [*models, *certificate.not_covered]


def spoiled(example, spoil):
    """The forward step of the example, whose microbatches are spoiled with context parallelism."""

    def step(iterator, model):
        batch = dict(next(iterator))
        if model.config.context_parallel_size > 1:
            spoil(batch)
        return example.forward_step(iter([batch]), model)

    return step


def without_documents(batch):
    del batch["cu_seqlens"], batch["max_seqlen"]


def wrong_split(batch):
    """Its labels are split by rows of another order."""
    batch["labels"] = batch["labels"].flip(1)


def without_gradients(example):
    """The forward step of the example, through whose losses no gradient goes back, at any size."""

    def step(iterator, model):
        output, loss = example.forward_step(iterator, model)
        return output.detach() + 0 * output, loss

    return step


def configuration(cp, **more):
    return layers.configuration(
        hidden_size=64, context_parallel_size=cp, calculate_per_token_loss=True,
        masked_softmax_fusion=False, **more,
    )  # fmt: skip


def whole_rows(model):
    """A step of a program that has forgotten to split its batch."""
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    model(tokens, torch.arange(128).expand(2, 128), None, labels=tokens)


def rejection(call):
    from cp_ring.errors import ConfigError

    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def rank(rank, ranks, port, folder):
    """Is rank `rank` of `ranks`, whose store the launcher holds at `port`; its output goes to
    `folder`/log.
    """
    os.environ |= worker.place(rank, ranks, port)
    worker.output_to(folder / "log")
    dist.init_process_group("gloo")
    main(folder)
    dist.destroy_process_group()
