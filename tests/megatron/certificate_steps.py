"""Forward steps of users' scripts, for the certificate: one that behaves as Megatron-LM's own
script, and ones that are wrong.
"""

import functools
import os

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from tests.megatron.small_script import loss_function

KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")


def get_batch(data_iterator):
    """As in Megatron-LM's script: every key is written back into the dictionary of the data loader."""
    batch = next(data_iterator)
    for key in KEYS:
        batch[key] = batch[key].cuda() if batch.get(key) is not None else None
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )


def run_model(model, batch):
    return model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )


def writes_into_its_batch(data_iterator, model):
    batch = get_batch(data_iterator)
    return run_model(model, batch), functools.partial(loss_function, batch["loss_mask"])


def writes_into_its_tensors(data_iterator, model):
    batch = next(data_iterator)
    batch["loss_mask"][:, -1] = 0  # the last token counts for nothing
    return writes_into_its_batch(iter([batch]), model)


def changes_the_process(data_iterator, model):
    """As models and scripts do that set what they need."""
    os.environ["OF_A_STEP"] = "0"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return writes_into_its_batch(data_iterator, model)


def mean_over_all_ranks(data_iterator, model):
    """As in older scripts: the loss function returns a mean over the tokens of all ranks, and no
    number of tokens.
    """
    batch = get_batch(data_iterator)

    def loss(output):
        mask = batch["loss_mask"].reshape(-1)
        total = torch.stack([torch.sum(output.reshape(-1) * mask), mask.sum()])
        count = total[1].clone()
        torch.distributed.all_reduce(count, group=parallel_state.get_context_parallel_group())
        return total[0] / count, {"lm loss": total.detach()}

    return run_model(model, batch), loss


def fails_everywhere(data_iterator, model):
    raise ValueError("no such batch")


def fails_before_the_ring(data_iterator, model):
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has no such batch")
    return writes_into_its_batch(data_iterator, model)


def fails_behind_the_ring(data_iterator, model):
    output, loss = writes_into_its_batch(data_iterator, model)
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has no such loss")
    return output, loss


def _set(name, value):
    """A step that changes its microbatch first, at any context parallel size alike."""

    def step(data_iterator, model):
        batch = next(data_iterator)
        return writes_into_its_batch(iter([batch | {name: value(batch)}]), model)

    return step


MISREAD = {
    "no loss mask": _set("loss_mask", lambda batch: torch.ones_like(batch["loss_mask"])),
    "loss mask of the token before": _set("loss_mask", lambda batch: batch["loss_mask"].roll(1, 1)),
    "loss mask of the token behind": _set(
        "loss_mask", lambda batch: batch["loss_mask"].roll(-1, 1)
    ),
    "loss mask reversed": _set("loss_mask", lambda batch: batch["loss_mask"].flip(1)),
    "loss mask of the other batch row": _set("loss_mask", lambda batch: batch["loss_mask"].flip(0)),
    "loss mask of the first batch row": _set(
        "loss_mask", lambda batch: batch["loss_mask"][:1].expand_as(batch["labels"])
    ),
    "hidden tokens count a little": _set("loss_mask", lambda batch: batch["loss_mask"] + 0.25),
    "labels shifted twice": _set("labels", lambda batch: batch["labels"].roll(-1, 1)),
    "labels not shifted": _set("labels", lambda batch: batch["tokens"]),
    "labels of the other batch row": _set("labels", lambda batch: batch["labels"].flip(0)),
    "last label that of the first token": _set(
        "labels", lambda batch: torch.cat([batch["labels"][:, :-1], batch["tokens"][:, :1]], 1)
    ),
}
"""Steps that do not train on what the batch declares, whatever the context parallel size."""


def further_predictions(data_iterator, model):
    batch = get_batch(data_iterator)
    named = {name: batch[name] for name in ("labels", "loss_mask")}
    output = model(batch["tokens"], batch["position_ids"], None, **named)
    return output, functools.partial(loss_function, batch["loss_mask"])


MISREAD["further predictions without the loss mask"] = writes_into_its_batch
