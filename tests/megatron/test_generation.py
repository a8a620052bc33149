"""Megatron's own generation engines on models with ring attention at context-parallel size 1,
against stock attention that sees all tokens again at each step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_ring.errors import ConfigError
from tests.megatron.groups import program

pytestmark = pytest.mark.xdist_group("pool")

VOCAB, N, COUNT = 64, 96, 64
PROMPT = torch.randint(VOCAB, (2, 21), generator=torch.Generator().manual_seed(9))
KINDS: dict[str, dict[str, Any]] = {
    "window": {
        "window_size": (9, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "num_query_groups": 2,
    },
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
}


def build(cp: int, kind: str, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=cp, use_cpu_initialization=True,
        masked_softmax_fusion=False, init_method_std=0.3, normalization="RMSNorm",
        **KINDS[kind], **more,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm"
    )
    model = GPTModel(
        config, spec, VOCAB, N, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.data = torch.linspace(-1, 1, parameter.numel())
    return model


@torch.no_grad()
def all_again(group: Any, kind: str) -> torch.Tensor:
    """On a rank: the likeliest tokens, each from a forward of all tokens before it, with stock
    attention.
    """
    from cp_ring import patches

    with program(1):
        patches.get("core_attention").revert()
        model, tokens = build(1, kind).eval(), PROMPT
        for _ in range(COUNT):
            n = tokens.shape[1]
            hidden = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
            places = torch.arange(n).expand(2, n)
            logits = model(tokens, places, hidden, runtime_gather_output=True)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


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
