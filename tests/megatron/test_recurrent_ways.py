"""--cp-ring-recurrent: a way for each kind of recurrent layers."""

from __future__ import annotations

import argparse

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.flags.checks_documents import recurrent_layers
from cp_ring.megatron.options import Options


def line(recurrent: str, cp: int, **given) -> str:
    """Why a model of both kinds, of the sizes of Qwen3-Next and Nemotron-H, is rejected."""
    sizes = {
        "hybrid_layer_pattern": "M*G*", "hidden_size": 4096, "context_parallel_size": cp,
        "tensor_model_parallel_size": 1, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    }  # fmt: skip
    own = Options.make(enabled=True, recurrent=recurrent)
    return recurrent_layers(Asked(argparse.Namespace(**sizes | given)), own) or ""


def test_heads_that_do_not_divide_ask_for_states():
    assert line("heads", 8) == ""
    told = "M*G*: the 16 heads of the gdn layers do not divide among 32 ranks: give --cp-ring-"
    assert told in line("heads", 32) and line("mamba=heads,gdn=states", 32) == ""
    assert "8 heads of the gdn layers" in line("heads", 16, tensor_model_parallel_size=2)
    assert "heads of the mamba layers" in line("gdn=states", 3)


def test_a_kind_has_a_way_of_its_own():
    of = {way: Options.make(recurrent=way).recurrent_ways for way in ("states", "gdn=states")}
    assert of == {
        "states": {"mamba": "states", "gdn": "states"},
        "gdn=states": {"mamba": "heads", "gdn": "states"},
    }


@pytest.mark.parametrize("value", ["tokens", "rwkv=states", "gdn=fast", "gdn=states,gdn=heads"])
def test_another_way_is_rejected(value):
    with pytest.raises(ConfigError, match=r"--cp-ring-recurrent .*mamba=states,gdn=heads"):
        Options.make(recurrent=value)


def test_the_choice_auto_has_left():
    with pytest.raises(ConfigError, match="--cp-ring-recurrent 'auto': it left cp_ring: give"):
        Options.make(recurrent="auto")
