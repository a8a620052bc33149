"""--cp-ring-recurrent auto, and ways by kind of layer."""

from __future__ import annotations

import argparse

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags.recurrent_choice import settle
from cp_ring.options import Options


def job(tokens: int = 262_144, cp: int = 8, **given) -> argparse.Namespace:
    """A model of both kinds of recurrent layers, of the sizes of Qwen3-Next and Nemotron-H."""
    sizes = {
        "hybrid_layer_pattern": "M*G*", "hidden_size": 4096, "bf16": True, "num_layers": 4,
        "seq_length": tokens, "micro_batch_size": 1, "context_parallel_size": cp,
        "tensor_model_parallel_size": 1, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    }  # fmt: skip
    return argparse.Namespace(**sizes | given)


def options(recurrent: str, **more) -> Options:
    # the ranks of a node share NVLink, whoever runs this test
    return Options.make(enabled=True, recurrent=recurrent, **more)


@pytest.mark.parametrize(
    ("args", "chosen", "said"),
    [
        (job(), "heads", ""),
        (job(cp=32), "mamba=heads,gdn=states", "their 16 heads do not divide among 32 ranks"),
        (job(cp=1), "heads", ""),
    ],
)
def test_auto_is_heads_where_they_divide(args, chosen, said, capfd):
    assert settle(args, options("auto")).recurrent == chosen
    assert said in capfd.readouterr().out


def test_a_kind_has_a_way_of_its_own():
    asked = options("mamba=auto,gdn=states")
    assert asked.recurrent_ways == {"mamba": "auto", "gdn": "states"}
    assert settle(job(cp=1), asked).recurrent == "mamba=heads,gdn=states"
    assert options("gdn=states").recurrent_ways == {"mamba": "heads", "gdn": "states"}


@pytest.mark.parametrize("cp", [1, 8])
def test_states_that_fork_leave_no_choice(cp, capfd):
    asked = options("mamba=auto,gdn=states", mask_kinds="tree,causal")
    assert settle(job(cp=cp, tokens=16_384), asked).recurrent == "states"
    assert "is states for mamba layers: these fork" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="does not support --deterministic-mode"):
        settle(job(cp=cp, deterministic_mode=True), asked)


@pytest.mark.parametrize("value", ["tokens", "rwkv=states", "gdn=fast", "gdn=states,gdn=heads"])
def test_another_way_is_rejected(value):
    with pytest.raises(ConfigError, match=r"--cp-ring-recurrent .*mamba=states,gdn=heads"):
        options(value)
