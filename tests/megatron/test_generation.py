"""`cp_ring.megatron.generate` at context-parallel sizes 1, 2 and 4 against stock attention that
sees all tokens again at each step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_ring.errors import ConfigError
from tests.megatron.groups import program

pytestmark = pytest.mark.xdist_group("pool")

VOCAB, N, COUNT = 64, 96, 64
PROMPT = torch.randint(VOCAB, (2, 21), generator=torch.Generator().manual_seed(9))
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
    "rope_type": "yarn", "rotary_scaling_factor": 4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "window": {
        "window_size": (9, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "num_query_groups": 2,
    },
    "latent": LATENT,
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
    "predictions": {"mtp_num_layers": 1},
}


def build(cp: int, kind: str, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    torch.manual_seed(3)
    make = MLATransformerConfig if kind == "latent" else TransformerConfig
    config = make(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=cp, use_cpu_initialization=True,
        masked_softmax_fusion=False, init_method_std=0.3, normalization="RMSNorm",
        **KINDS[kind], **more,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=kind == "latent",
        normalization="RMSNorm",
    )
    further = None
    if kind == "predictions":
        further = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config, spec, VOCAB, N, position_embedding_type="rope", mtp_block_spec=further,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.data = torch.linspace(-1, 1, parameter.numel())
    return model


@torch.no_grad()
def all_again(group: Any, kind: str) -> torch.Tensor:
    """On a rank: the likeliest tokens, each from a forward of all tokens before it; with stock
    attention where it is there on the CPU.
    """
    from cp_ring import patches

    with program(1):
        if kind != "latent":
            patches.get("core_attention").revert()
        model, tokens = build(1, kind).eval(), PROMPT
        for _ in range(COUNT):
            n = tokens.shape[1]
            hidden = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
            places = torch.arange(n).expand(2, n)
            given = hidden if kind != "latent" else None
            logits = model(tokens, places, given, runtime_gather_output=True)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


def generated(
    group: Any, kind: str, cp: int, prompt: int = 21, fault: bool = False, **settings: Any
) -> torch.Tensor:
    """On a rank: the likeliest tokens from a cache of keys."""
    import cp_ring.megatron
    from cp_ring.megatron.generation import KeyCache

    keep, tp = KeyCache.keep, settings.get("tp", 1)

    def with_padding(self: Any, *tensors: Any) -> None:
        self.prompt += 4
        keep(self, *tensors)
        self.prompt -= 4

    KeyCache.keep = with_padding if fault else keep  # type: ignore[method-assign]
    try:
        with program(cp, **settings):
            model = build(cp, kind, tensor_model_parallel_size=tp)
            return cp_ring.megatron.generate(model, PROMPT[:, :prompt], COUNT + 21 - prompt)
    finally:
        KeyCache.keep = keep  # type: ignore[method-assign]


def test_tokens_are_those_of_all_tokens_at_once(pool):
    wanted = pool.run(all_again, 4, "window")[0]
    assert len(set(wanted[:, 21:].flatten().tolist())) > 8
    assert all(torch.equal(found, wanted) for found in pool.run(generated, 4, "window", 2))


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_at_every_size(pool, kind):
    wanted = pool.run(all_again, 4, kind)[0]
    for cp in (1, 2, 4):
        assert all(torch.equal(found, wanted) for found in pool.run(generated, 4, kind, cp))
    assert not torch.equal(pool.run(generated, 4, kind, 4, fault=True)[0], wanted)


@pytest.mark.ci
def test_tokens_under_other_settings(pool):
    wanted = pool.run(all_again, 4, "predictions")[0]
    for settings in (
        {"tp": 2},
        {"layout": "balanced"},
        {"layout": "balanced", "document_mask": True},
        {"mask_kinds": ("documents",)},
    ):
        found = pool.run(generated, 4, "predictions", 2, **settings)
        assert all(torch.equal(each, wanted) for each in found), settings
    short = [pool.run(generated, 4, "predictions", cp, prompt=1)[0] for cp in (1, 2)]
    assert torch.equal(*short)


def around_a_step(group: Any) -> list[Any]:
    """On a rank: gradients before and after generation with tokens that ranks choose for
    themselves; the tokens; lines of models that cannot generate.
    """
    import cp_ring.megatron

    def line(change: dict[str, Any], of: Any) -> str:
        before = {name: getattr(of, name, None) for name in change}
        vars(of).update(change)
        try:
            cp_ring.megatron.generate(model, PROMPT, 1)
        except ConfigError as error:
            return str(error)
        finally:
            vars(of).update(before)
        return ""

    with program(2):
        model = build(2, "window")
        batch = cp_ring.megatron.split_batch({"tokens": PROMPT[:, :20], "position_ids": PLACES})

        def gradients() -> list[torch.Tensor]:
            model.zero_grad()
            model(batch["tokens"], batch["position_ids"], None).sum().backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        model.decoder.layers[0].eval()  # a frozen one
        before, modes = gradients(), [part.training for part in model.modules()]
        torch.manual_seed(dist.get_rank())
        tokens = cp_ring.megatron.generate(
            model, PROMPT, 9, lambda logits: torch.multinomial(logits.softmax(-1), 1)[:, 0]
        )
        early = cp_ring.megatron.generate(
            model, PROMPT, 9, lambda logits: torch.full((2,), 5), end=5
        )
        same = [part.training for part in model.modules()] == modes
        same &= all(torch.equal(x, y) for x, y in zip(before, gradients(), strict=True))
        lines = [
            line({"pipeline_model_parallel_size": 2}, model.config),
            line({"sequence_parallel": True, "tensor_model_parallel_size": 2}, model.config),
            line({"position_embedding_type": "mrope"}, model),
            line({"apply_rope_fusion": True, "multi_latent_attention": True}, model.config),
        ]
        model.decoder.other = type("MambaMixer", (torch.nn.Module,), {})()
        return [same, tokens, early.shape[1], [*lines, line({}, model)]]


PLACES = torch.arange(20).expand(2, 20)


def test_training_is_what_it_was_before_generation(pool):
    parts = (
        "pipeline-model-parallel-size 2",
        "--sequence-parallel",
        "mrope",
        "fusion",
        "MambaMixer",
    )
    found = pool.run(around_a_step, 4)
    for same, tokens, early, lines in found:
        assert same and early == 22
        assert torch.equal(tokens[:, :21], PROMPT) and tokens.shape == (2, 30)
        assert all(part in line for part, line in zip(parts, lines, strict=True)), lines
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[2][1], found[3][1])


def example(group: Any, cp: int) -> Any:
    """On a rank: docs/examples/generate.py."""
    with program(cp):
        from docs.examples import generate

        return generate.main(generate.build(cp))


def test_the_example_is_one_rank(pool):
    (wanted, _, likelihoods), *_ = pool.run(example, 4, 1)
    first, second, *_ = pool.run(example, 4, 2)
    assert torch.equal(first[0], wanted) and torch.equal(first[1], second[1])
    assert (likelihoods[0] < -1).all() and torch.allclose(first[2], likelihoods, rtol=1e-5)
    # all greedy tokens are the likeliest ones
    assert likelihoods[1, :2].tolist() == [0, 0] and (likelihoods[1, 2:] > 0).all()


@torch.no_grad()
def by_engines(group: Any, kind: str, ring: bool) -> list[torch.Tensor]:
    """On a rank: the likeliest tokens by Megatron's own engines, with stock or ring attention."""
    from cp_ring import patches
    from tests.megatron import engines

    with program(2), engines.on_the_cpu(), pytest.raises(ConfigError, match="--context-parallel"):
        engines.dynamic(build(2, kind).eval(), PROMPT, 1)
    with program(1), engines.on_the_cpu():
        if not ring:
            patches.get("core_attention").revert()
        model = build(1, kind).eval()
        return [
            engines.static(model, PROMPT, COUNT),
            engines.dynamic(model, PROMPT, COUNT),
            engines.dynamic(model, PROMPT, COUNT, chunk=16),
        ]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["window", "experts"])
def test_engines_of_megatron_at_cp_1(pool, kind):
    wanted = pool.run(all_again, 4, kind)[0]
    for ring in (False, True):
        found = pool.run(by_engines, 4, kind, ring)[0]
        assert all(torch.equal(each, wanted) for each in found), ring
