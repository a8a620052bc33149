"""Hugging Face models whose ranks hold parts of the sequence have the loss and the gradients of the
whole one, with transformers' own attention.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from cp_ring import ConfigError

pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 9}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "Llama": {},
    "Mistral": WINDOW,
    "Qwen3": {},
    "Qwen3Moe": EXPERTS | {"num_experts": 4},
    "Gemma3": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LENGTHS = (11, 1, 30)  # of packed documents


def model_of(family):
    import transformers

    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    torch.manual_seed(5)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | FAMILIES[family]))
    made.set_experts_implementation("eager")  # the other one is not for float64
    return made.double().train()


def batch_of(packed):
    generator = torch.Generator().manual_seed(3)
    rows, n = (1, sum(LENGTHS)) if packed else (2, 42)
    tokens = torch.randint(61, (rows, n), generator=generator)
    labels = tokens.masked_fill(torch.rand(rows, n, generator=generator) < 0.2, -100)
    if packed:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        labels[positions == 0] = -100  # as DataCollatorWithFlattening makes them
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}
    mask = torch.ones_like(tokens)
    mask[1, 37:] = 0
    labels = labels.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def trained(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: x.grad for name, x in model.named_parameters()}


@functools.cache
def whole(family, packed):
    """With transformers' own attention; each document is a batch."""
    model, batch = model_of(family), batch_of(packed)
    model.set_attn_implementation("eager")
    if not packed:
        return trained(model, batch)
    count = int((batch["labels"] != -100).sum())
    parts = zip(*(x.split(LENGTHS, 1) for x in batch.values()), strict=True)
    losses = [
        trained(model, dict(zip(batch, part, strict=True)) | {"num_items_in_batch": count})[0]
        for part in parts
    ]
    return sum(losses), {name: x.grad for name, x in model.named_parameters()}


def on_rank(group, family, packed, fault=""):
    from cp_ring.integrations.transformers import OFFSETS, shard_batch, use_ring_attention

    model = model_of(family)
    use_ring_attention(model, group)
    batch = shard_batch(batch_of(packed), group)
    if fault == "documents":
        batch[OFFSETS] = (0, batch[OFFSETS][-1])
    elif fault:
        batch[fault] = batch[fault].roll(1, -1)
    loss, gradients = trained(model, batch)
    mean = torch.tensor([loss], dtype=torch.float64)
    for x in (mean, *gradients.values()):
        dist.all_reduce(x, group=group)
        x /= group.size()
    return mean.item(), gradients


def largest_error(found, wanted):
    errors = [abs(found[0] - wanted[0]) / wanted[0]]
    for name, x in wanted[1].items():
        errors.append(((found[1][name] - x).norm() / x.norm().clamp(min=1e-12)).item())
    return max(errors)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_whole_batch(pool, family, packed):
    for found in pool.run(on_rank, 2, family, packed):
        assert largest_error(found, whole(family, packed)) < 1e-6


def test_on_four_ranks(pool):
    assert largest_error(pool.run(on_rank, 4, "GptOss", True)[0], whole("GptOss", True)) < 1e-6


@pytest.mark.parametrize("fault", ["documents", "position_ids", "shift_labels"])
def test_a_planted_fault_shows(pool, fault):
    assert largest_error(pool.run(on_rank, 2, "Qwen3", True, fault)[0], whole("Qwen3", True)) > 1e-3


def rejected(call, *args, **named):
    with pytest.raises(ConfigError) as error:
        call(*args, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_split_is_rejected():
    import transformers

    from cp_ring.integrations.transformers import shard_batch, use_ring_attention

    small = SIZES | {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    hybrid = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**small))
    assert "linear_attention" in rejected(use_ring_attention, hybrid)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    )
    assert "its attention" in rejected(use_ring_attention, bloom)
    tokens = torch.arange(8)[None]
    left = {"input_ids": tokens, "attention_mask": (tokens > 2).long()}
    assert "padding_side" in rejected(shard_batch, left)
    assert "pixel_values" in rejected(shard_batch, {"input_ids": tokens, "pixel_values": tokens})
    assert "labels" in rejected(shard_batch, {"input_ids": tokens, "labels": tokens[:, 1:]})
    rows = {"input_ids": tokens.expand(2, -1), "position_ids": tokens.expand(2, -1) % 4}
    assert "one batch row" in rejected(shard_batch, rows)


def test_what_attention_does_not_know_is_rejected():
    from cp_ring.integrations.transformers import shard_batch, use_ring_attention

    model, batch = model_of("Llama"), shard_batch(batch_of(packed=True))
    use_ring_attention(model)
    assert "shard_batch" in rejected(model, torch.arange(8)[None])
    model.model.layers[1].self_attn.attention_dropout = 0.5
    assert "dropout" in rejected(model, **batch)
    FAMILIES["Gemma2"] = WINDOW | {"attn_logit_softcapping": 1.5}
    capped = model_of("Gemma2")
    del FAMILIES["Gemma2"]
    use_ring_attention(capped)
    assert "caps its scores (softcap)" in rejected(capped, **batch)
