"""RingTrainer trains, evaluates and orders rows as transformers' Trainer does on one rank."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from tests.megatron import worker
from tests.megatron.launch import fork
from tests.rings import said

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
COUNTS = (36, 20, 4, 20, 33, 7, 29, 11)  # labels of the rows


class Rows(Dataset):
    """Rows of 40 tokens with uneven numbers of labels; notes the order in which they are read."""

    def __init__(self, count, lengths=None):
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(61, (count, 40), generator=generator)
        self.lengths = lengths or [40] * count
        self.read = []

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        self.read.append(index)
        length = self.lengths[index]
        tokens = self.tokens[index, :length]
        labels = tokens.clone()
        labels[COUNTS[index % len(COUNTS)] :] = -100
        return {"input_ids": tokens, "labels": labels}


def collate(rows):
    """Padded at the end, with an attention mask."""
    n = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.stack(
            [
                torch.nn.functional.pad(row[name], (0, n - len(row[name])), value=fill)
                for row in rows
            ]
        )
        for name, fill in fills.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return batch | {"attention_mask": (torch.arange(n) < lengths[:, None]).long()}


def own_loss(outputs, labels, num_items_in_batch=None):
    """As a user's: it shifts whole rows itself, and weighs tokens by their place."""
    logits, wanted = outputs["logits"][:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), wanted.flatten(), reduction="none"
    ).view(wanted.shape)
    weights = torch.linspace(0.5, 1.5, wanted.shape[1])
    count = (wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return (losses * weights * (wanted != -100)).sum() / count


def accuracy(prediction):
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": right.mean().item(), "rows": len(right)}


WAYS = {
    "accumulation": {},
    "smoothing": {"label_smoothing_factor": 0.3},
    "own loss": {"compute_loss_func": own_loss},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "by rank": {"average_tokens_across_devices": False},
    "experts": {},
}
OF_TRAINER = {"compute_loss_func"}


def model_of(way):
    torch.manual_seed(5)
    if way != "experts":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5, keys_to_ignore_at_inference=["router_logits", "aux_loss"],
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double()


def trainer_of(way, cp, folder, **more):
    """Trainer itself if `cp` is 0."""
    from cp_ring.integrations.transformers import RingTrainer

    options = WAYS[way] | more
    arguments = transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=1, gradient_accumulation_steps=4,
        per_device_eval_batch_size=3, learning_rate=1e-2, logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", use_cpu=True, eval_strategy="epoch", optim="sgd",
        seed=3, **{name: value for name, value in options.items() if name not in OF_TRAINER},
    )  # fmt: skip
    lengths = [40, 31, 17, 40, 22, 13, 40, 35, 28, 19, 40, 26] if way == "by length" else None
    data, model = Rows(12, lengths), model_of(way)
    model.set_attn_implementation("eager")
    named = {
        "train_dataset": data, "eval_dataset": {"few": Rows(2), "many": Rows(11)},
        "data_collator": collate, "compute_metrics": accuracy,
        "compute_loss_func": options.get("compute_loss_func"),
    }  # fmt: skip
    if cp:
        return RingTrainer(model, arguments, context_parallel_size=cp, **named)
    return transformers.Trainer(model, arguments, **named)


def trained(way, cp, folder):
    trainer = trainer_of(way, cp, folder)
    trainer.train()
    predicted = trainer.predict(Rows(5)).predictions
    names = ("loss", "grad_norm", "eval_few_loss", "eval_many_loss", "eval_many_accuracy")
    log = [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
    ]
    weights = [x.detach().clone() for x in trainer.model.parameters()]
    order = trainer.train_dataset.read
    return [entry for entry in log if entry], order, torch.as_tensor(predicted), weights


def rejected(folder):
    """What RingTrainer says about arguments that it does not know, by argument."""
    wrong = {
        "neftune_noise_alpha": 5.0,
        "train_sampling_strategy": "batch_rebalance",
    }
    return {
        name: said(trainer_of, "accumulation", 2, folder, **{name: value})
        for name, value in wrong.items()
    } | {"context_parallel_size": said(trainer_of, "accumulation", 3, folder)}


def rank(rank, ranks, port, out, cp):
    """Is rank `rank` of `ranks`, whose store the launcher holds at `port`: trains in all ways, and
    saves the results in `out`.
    """
    os.environ |= worker.place(rank, ranks, port)
    worker.output_to(out / "log")
    with tempfile.TemporaryDirectory() as folder:
        results = {way: trained(way, cp, folder) for way in WAYS}
        if cp:
            results["rejected"] = rejected(folder)
    torch.save(results, out / f"{cp}.{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of Trainer on one rank, and of each of two ranks."""
    out = tmp_path_factory.mktemp("trained")
    for ranks, cp in ((1, 0), (2, 2)):
        assert not fork(ranks, (out, cp), target=rank), (out / "log").read_text()[-3000:]
    return [torch.load(out / name, weights_only=False) for name in ("0.0.pt", "2.0.pt", "2.1.pt")]


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_and_evaluates_as_trainer_does(results, way):
    """Over 6 steps of 4 microbatches, with uneven labels, and two data sets to evaluate."""
    log, order, predicted, weights = results[0][way]
    assert len([entry for entry in log if "grad_norm" in entry]) == 6
    assert order[:12] != order[12:24]  # another order in the second epoch
    for ours in results[1:]:
        steps, its_order, its_predicted, its_weights = ours[way]
        assert its_order == order
        for found, right in zip(steps, log, strict=True):
            assert found == pytest.approx(right, rel=1e-6)
        assert torch.allclose(its_predicted, predicted, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(its_weights, weights, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-8)


def test_what_it_cannot_follow_is_one_line(results):
    for ours in results[1:]:
        for name, line in ours["rejected"].items():
            assert name in line and "\n" not in line
