"""Hugging Face models whose ranks hold parts of the sequence have the loss and the gradients of the
whole one, with transformers' own attention.
"""

import functools
import re

import pytest
import torch
import torch.distributed as dist

from tests.rings import said

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from cp_ring.integrations.transformers import (  # noqa: E402
    OFFSETS,
    shard_batch,
    use_ring_attention,
)

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
    # their layers do not tell the window, which is in the mask alone
    "Phimoe": WINDOW | {"num_local_experts": 4},
    "Qwen2Moe": WINDOW
    | EXPERTS
    | {"num_experts": 4, "use_sliding_window": True, "max_window_layers": 2},
}
LENGTHS = (11, 1, 30)  # of packed documents


LENGTH = 42  # of batch rows
# Trained for fewer tokens than a row has, and for more than some rank's part shows: of a row of 42
# in zigzag, ranks of 2 see positions up to 31 and 41
ROTARY = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 36,
    },
}
FAMILIES |= {
    f"Llama, {name}": {
        "max_position_embeddings": 36 if name == "dynamic" else 128,
        "rope_parameters": {"rope_theta": 1e4, **parameters},
    }
    for name, parameters in ROTARY.items()
}


def model_of(family, head="ForCausalLM"):
    first = family.split(",")[0]
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(family, (f"{first}Config", f"{first}{head}"))
    torch.manual_seed(5)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | FAMILIES[family]))
    made.set_experts_implementation("eager")  # the other one is not for float64
    return made.double().train()


def batch_of(packed):
    generator = torch.Generator().manual_seed(3)
    rows, n = (1, sum(LENGTHS)) if packed else (2, LENGTH)
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


def averaged(group, loss, gradients):
    """The means over the ranks."""
    mean = torch.tensor([loss], dtype=torch.float64)
    for x in (mean, *gradients.values()):
        dist.all_reduce(x, group=group)
        x /= group.size()
    return mean.item(), gradients


def on_rank(group, family, packed, fault="", make=model_of, compiled=False):
    model = make(family)
    use_ring_attention(model, group)
    if compiled:
        model.compile(backend="aot_eager")
    batch = shard_batch(batch_of(packed), group)
    if fault == "documents":
        batch[OFFSETS] = (0, batch[OFFSETS][-1])
    elif fault:
        batch[fault] = batch[fault].roll(1, -1)
    return averaged(group, *trained(model, batch))


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


def test_a_compiled_model_has_the_loss_and_gradients_of_the_whole_batch(pool):
    for found in pool.run(on_rank, 2, "Llama", True, compiled=True):
        assert largest_error(found, whole("Llama", True)) < 1e-6


def test_tokens_by_place_or_embedded():
    model = model_of("Llama")
    use_ring_attention(model)
    batch = shard_batch(batch_of(True))
    loss, tokens = model(**batch).loss, batch.pop("input_ids")
    assert model(tokens, **batch).loss == loss
    assert model(inputs_embeds=model.get_input_embeddings()(tokens), **batch).loss == loss


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def balanced(family):
    FAMILIES["Mixtral"] = MIXTRAL
    model = model_of(family)
    for name, value in BALANCED.items():
        setattr(model.config, name, value)
    model.router_aux_loss_coef = BALANCED["router_aux_loss_coef"]
    return model


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_the_balance_loss_of_experts_is_that_of_the_whole_batch(pool, family):
    """Of its tokens that are no padding, at any context parallel size."""
    model = balanced(family)
    model.set_attn_implementation("eager")
    wanted = trained(model, batch_of(False))
    for cp in (1, 2):
        for found in pool.run(on_rank, cp, family, False, make=balanced):
            assert largest_error(found, wanted) < 1e-6


def test_another_balance_loss_is_one_line():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    config = transformers.JetMoeConfig(
        **sizes, num_key_value_heads=2, kv_channels=8, output_router_logits=True
    )
    line = said(use_ring_attention, transformers.JetMoeForCausalLM(config))
    assert "JetMoeForCausalLM has a balance loss of experts" in line
    config.output_router_logits = False
    model = transformers.JetMoeForCausalLM(config)
    use_ring_attention(model)
    batch = shard_batch({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})
    assert model(**batch).loss.isfinite()
    assert "has a balance loss of experts" in said(model, **batch, output_router_logits=True)


def kept_logits(group):
    """What keywords of the model say that mean whole rows."""
    model = model_of("Llama")
    use_ring_attention(model, group)
    none = dict.fromkeys(("labels", "position_ids", "attention_mask", "token_type_ids"))
    batch = shard_batch({"input_ids": torch.arange(24)[None], **none}, group)
    kept = [said(model, **batch, logits_to_keep=kept) for kept in (7, torch.arange(3))]
    return [*kept, said(model, **batch, attention_mask=torch.ones(1, 24))]


def test_keywords_of_the_model_that_mean_whole_rows_are_one_line(pool):
    for *kept, mask in pool.run(kept_logits, 2):
        assert all(
            line.startswith("logits_to_keep would keep tokens of each rank") for line in kept
        )
        assert mask.startswith("attention_mask has no effect after shard_batch")


def split_twice(group):
    batch = {"input_ids": torch.arange(24)[None]}
    return said(shard_batch, shard_batch(batch, group), group)


def test_a_batch_that_is_split_twice_is_one_line(pool):
    for cp in (1, 2):
        for line in pool.run(split_twice, cp):
            assert line.startswith("the batch is split already")


@pytest.mark.parametrize("fault", ["documents", "position_ids", "shift_labels"])
def test_a_planted_fault_shows(pool, fault):
    assert largest_error(pool.run(on_rank, 2, "Qwen3", True, fault)[0], whole("Qwen3", True)) > 1e-3


class LowRank(torch.nn.Module):
    """An adapter: a weight and a product of two small ones."""

    def __init__(self, weight):
        super().__init__()
        rows, columns = weight.shape
        self.down = torch.nn.Parameter(torch.randn(4, columns, dtype=weight.dtype) * 0.02)
        self.up = torch.nn.Parameter(torch.zeros(rows, 4, dtype=weight.dtype))

    def forward(self, weight):
        return weight + self.up @ self.down


def of_adapters(group, ring):
    """The loss, and the gradients of the adapters of a frozen model."""
    model = model_of("Llama").requires_grad_(False)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            torch.nn.utils.parametrize.register_parametrization(
                linear, "weight", LowRank(linear.weight)
            )
    if ring:
        use_ring_attention(model, group)
    batch = shard_batch(batch_of(False), group) if ring else batch_of(False)
    loss, gradients = trained(model, batch)
    mine = {name: x for name, x in gradients.items() if x is not None}
    return averaged(group, loss, mine) if ring else (loss, mine)


def test_adapters_have_the_gradients_of_the_whole_batch(pool):
    wanted = of_adapters(None, False)
    assert len(wanted[1]) == 8 and any(x.any() for x in wanted[1].values())
    for found in pool.run(of_adapters, 2, True):
        assert largest_error(found, wanted) < 1e-6


def test_what_cannot_be_split_is_rejected():
    small = SIZES | {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    hybrid = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**small))
    assert "linear_attention" in said(use_ring_attention, hybrid)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    )
    assert "its attention" in said(use_ring_attention, bloom)
    roberta = transformers.RobertaConfig(num_hidden_layers=1, is_decoder=True)
    line = said(use_ring_attention, transformers.RobertaForCausalLM(roberta))
    assert "counts positions from its padding token" in line
    tokens = torch.arange(8)[None]
    good = {"input_ids": tokens}
    batches = {
        "padding_side": good | {"attention_mask": (tokens > 2).long()},
        "attention_mask numbers documents: give position_ids": good
        | {"attention_mask": 1 + tokens // 4},
        "numbers documents": good | {"attention_mask": 3 - tokens // 4},
        "pixel_values": good | {"pixel_values": tokens},
        "labels is \\(1, 7\\): it must be \\(1, 8\\)": good | {"labels": tokens[:, 1:]},
        "labels is a list: it must be a tensor": good | {"labels": tokens.tolist()},
        "input_ids is list: give input_ids, a tensor": {"input_ids": tokens.tolist()},
        "input_ids is \\(8,\\)": {"input_ids": tokens[0]},
        "the batch has inputs_embeds: give input_ids": {"inputs_embeds": torch.ones(1, 8, 32)},
        "batch is a list: give a dict": [good],
        "one batch row": {
            "input_ids": tokens.expand(2, -1),
            "position_ids": tokens.expand(2, -1) % 4,
        },
    }
    for line, batch in batches.items():
        assert re.search(line, said(shard_batch, batch))


def test_models_that_are_none_or_pool_a_row_are_rejected():
    llama = model_of("Llama")
    assert "model is a str, not" in said(use_ring_attention, "meta-llama/Llama-3.2-1B")
    wrapped = torch.nn.DataParallel(llama)
    assert "give model.module, before it is wrapped" in said(use_ring_attention, wrapped)
    compiled = torch.compile(llama)
    assert "give model._orig_mod" in said(use_ring_attention, compiled)
    for head in ("ForSequenceClassification", "ForQuestionAnswering"):
        line = said(use_ring_attention, model_of("Llama", head))
        assert "may pool a row" in line and "cp_ring.unshard(hidden_states, group=group)" in line
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4}
    two_heads = transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**sizes))
    assert "may pool a row" in said(use_ring_attention, two_heads)
    for kind in (transformers.GPT2LMHeadModel, transformers.GPT2Model):
        use_ring_attention(kind(transformers.GPT2Config(**sizes)))
    for head in ("ForCausalLM", "ForTokenClassification", "Model"):
        use_ring_attention(model_of("Llama", head))


def test_options_that_the_integration_cannot_follow_are_rejected():
    model = model_of("Llama")
    for name, value in {
        "layout": "contiguous", "qkv_format": "bhsd", "causal": False, "window_size": (3, 0),
        "cu_seqlens": [0, 8], "mask": None, "plan": None, "softmax_scale": 1.0, "sink": None,
    }.items():  # fmt: skip
        line = said(use_ring_attention, model, **{name: value})
        assert f"does not take {name}=" in line and "shard_batch and the layers" in line
    assert "known here are route, schedule" in said(use_ring_attention, model, rout="ring")
    use_ring_attention(model, layout="zigzag", route="ring", kernel="cpu")


def with_positions_of_a_mask(group):
    """As trainers make them for padded rows: the number of tokens before, and 1 for hidden ones."""
    model, batch = model_of("Llama"), batch_of(False)
    mask = batch["attention_mask"]
    batch["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    use_ring_attention(model, group)
    loss, _ = trained(model, shard_batch(batch, group))
    return averaged(group, loss, {})[0]


def test_positions_of_hidden_tokens_begin_no_document(pool):
    for loss in pool.run(with_positions_of_a_mask, 2):
        assert abs(loss - whole("Llama", False)[0]) < 1e-6


def test_what_attention_does_not_know_is_rejected():
    model, batch = model_of("Llama"), shard_batch(batch_of(packed=True))
    use_ring_attention(model)
    assert "shard_batch" in said(model, torch.arange(8)[None])
    model.model.layers[1].self_attn.attention_dropout = 0.5
    assert "dropout" in said(model, **batch)
    FAMILIES["Gemma2"] = WINDOW | {"attn_logit_softcapping": 1.5}
    capped = model_of("Gemma2")
    del FAMILIES["Gemma2"]
    use_ring_attention(capped)
    assert "caps its scores (softcap)" in said(capped, **batch)
