"""Whole layers of Megatron's with ring attention on fake GPUs, forward and backward: Megatron's own
modules on PyTorch's kernels, and those of TransformerEngine with its real library.
"""

import pytest

from tests.fakegpu.process import ProgramError
from tests.fakegpu.replay import hangs, in_flight_together, mismatches
from tests.fakegpu.test_ring import races, slow_steps

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 64, "rope_type": "rope",
}  # fmt: skip
CASES = {
    "causal": {},
    "window": {"window_size": (100, 0)},
    "sinks": {"softmax_type": "learnable"},
    "packed": {"documents": [0, 100, 300, 301, 512]},
    "latent": {"options": {"wire": "latent"}, **LATENT},
    "heads": {"options": {"heads": 2}},
    "recompute": FULL,
}
PLANTED = ("sync in a hop", "lost wait for keys", "values before keys")


def checked(logs, cases):
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown() and not log.stubs()
        assert not in_flight_together(log)
        for case in cases:
            assert not slow_steps(log, case)
            assert log.kernels(f"{case} 1") == log.kernels(f"{case} 2") != []


def with_kernel(kernel):
    return {
        name: case | {"options": {"kernel": kernel, **case.get("options", {})}}
        for name, case in CASES.items()
    }


@pytest.mark.ci
def test_layers_of_megatron(gpus):
    cases = with_kernel("flash_aten")
    checked(gpus.run("tests.fakegpu.layers:blocks", 2, 90, cases=cases), cases)


@pytest.mark.ci
def test_faults_in_layers_are_found(gpus):
    # keys and values of different sizes, which would be taken for each other
    options = {"kernel": "flash_aten", "wire": "plain"}
    cases = {name: {"options": options, **LATENT} for name in PLANTED}
    logs = gpus.run("tests.fakegpu.layers:blocks", 2, 90, cases=cases, planted=True)
    assert all(slow_steps(log, "sync in a hop") for log in logs)
    assert all(races(log, "lost wait for keys") for log in logs)
    assert mismatches(logs, "values before keys")


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_layers_of_transformer_engine(with_te, sm):
    cases = with_kernel("transformer_engine")
    logs = with_te.run(
        "tests.fakegpu.layers:blocks", 2, sm, cases=cases, implementation="transformer_engine"
    )
    checked(logs, cases)
    for log in logs:
        assert any(x.name.startswith("cudnn") for x in log.kernels("causal 2"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["layout of TransformerEngine", "dtype of TransformerEngine"])
def test_what_transformer_engine_rejects_ends_the_program(with_te, fault):
    cases = {fault: {"options": {"kernel": "transformer_engine"}}}
    with pytest.raises(ProgramError, match="sb3hd" if "layout" in fault else "type"):
        with_te.run("tests.fakegpu.layers:blocks", 2, 90, cases=cases, planted=True)
