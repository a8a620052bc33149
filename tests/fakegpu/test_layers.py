"""Whole layers of Megatron's with ring attention on fake GPUs, forward and backward: Megatron's own
modules on PyTorch's kernels, and those of TransformerEngine with its real library.
"""

import json

import pytest

from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.tools.tune import attention_costs
from cp_ring.tools.tune_model import ModelSizes, ParallelSizes, TrainingSetup, step_memory
from tests.fakegpu.layers import LARGE
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
GRAPHED = {name: case for name, case in CASES.items() if name not in ("packed", "recompute")}
GRAPHED["core_attn"] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
GRAPHED["further predictions"] = {"mtp_num_layers": 1}
PLANTED = ("sync in a hop", "lost wait for keys", "values before keys")


def checked(logs, cases):
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.unknown() and not log.stubs()
        assert not in_flight_together(log)
        for case in cases:
            assert not slow_steps(log, case)
            assert log.kernels(f"{case} 1") == log.kernels(f"{case} 2") != []


def with_kernel(kernel, cases=CASES):
    return {
        name: case | {"options": {"kernel": kernel, **case.get("options", {})}}
        for name, case in cases.items()
    }


@pytest.mark.ci
def test_layers_of_megatron(gpus):
    cases = with_kernel("flash_aten")
    checked(gpus.run("tests.fakegpu.layers:blocks", 2, 90, cases=cases), cases)


def captured(gpus, kernel, implementation, names):
    """A graph has all that a layer launches and sends; a step launches nothing else."""
    cases = with_kernel(kernel, {name: GRAPHED[name] for name in names})
    logs = gpus.run(
        "tests.fakegpu.layers:graphs", 2, 90, cases=cases, implementation=implementation
    )
    assert not hangs(logs) and not mismatches(logs)
    for log in logs:
        assert not races(log) and not log.stubs() and not log.capture_faults
        for case in cases:
            capture, before = f"{case} capture", f"{case} before"
            assert len(log.kernels(capture)) > len(log.kernels(before)) > 0
            assert log.of(capture, "nccl") and log.of(before, "nccl")
            for step in (f"{case} 0", f"{case} 1"):
                launched = [kernel.name for kernel in log.kernels(step)]
                if case == "further predictions":  # and more around the layers of a model
                    assert launched.count("graph") == 6
                    continue
                # TransformerEngine also fills a tensor before each
                assert launched.count("graph") == 4 and len(launched) <= 8
                assert not log.of(step, "nccl")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["sinks"], marks=pytest.mark.ci),
        pytest.param([*GRAPHED], marks=pytest.mark.slow),
    ],
)
def test_megatrons_graphs_of_layers(gpus, names):
    captured(gpus, "flash_aten", "local", names)


@pytest.mark.slow
def test_megatrons_graphs_of_layers_of_transformer_engine(with_te):
    captured(with_te, "transformer_engine", "transformer_engine", GRAPHED)


@pytest.mark.slow
def test_a_fault_in_megatrons_graphs_is_found(gpus):
    options = {"kernel": "flash_aten"}
    cases = {"sync in a hop": {"options": options}, "lost wait for keys": {"options": options}}
    logs = gpus.run("tests.fakegpu.layers:graphs", 2, 90, cases=cases, planted=True)
    for log in logs:
        assert all(any(case in fault for fault in log.capture_faults) for case in cases)


@pytest.mark.slow
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


OF_TUNE = {
    "as LARGE": {},
    "two layers": {"num_layers": 2},
    "recomputed": FULL,
    "narrow network": {"ffn_hidden_size": 4096},
    "without a gate": {"gated_linear_unit": False, "bias_activation_fusion": False},
}


def tuned(case, cp):
    """The bytes that `cp-ring tune` predicts for the layers of a case: kept, and the most."""
    more = LARGE | case
    layers, hidden = more["num_layers"], more["hidden_size"]
    model = ModelSizes(
        layers=layers, networks=layers, hidden=hidden,
        ffn=more.get("ffn_hidden_size", 4 * hidden), vocabulary=0,
        layer=AttentionSizes(more["num_attention_heads"], more["num_query_groups"], 128, 128),
        windows=(((-1, -1), layers),), gated=more.get("gated_linear_unit", True),
    )  # fmt: skip
    setup = TrainingSetup(model=model, seq_length=more["tokens"] * cp, global_batch=1, gpus=cp)
    recompute = "replay" if "recompute_granularity" in case else "none"
    cost = next(x for x in attention_costs(setup)(1, cp) if x.heads == 1)
    items = step_memory(setup, ParallelSizes(1, cp, 1, 1), recompute, cost)
    return items["activations"], items["activations"] + items["backward of a layer"]


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
def test_tune_predicts_the_memory_of_layers(with_te, cp, tmp_path):
    cases = {name: {"options": {}, **case} for name, case in OF_TUNE.items()}
    with_te.run("tests.fakegpu.layers:memory", cp, 90, folder=str(tmp_path), cases=cases)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(cp)]
    for name, case in OF_TUNE.items():
        kept, most = (max(each[name][i] for each in found) for i in (0, 1))
        predicted = tuned(case, cp)
        assert most == pytest.approx(predicted[1], rel=0.02), name
        if case != FULL:
            assert kept == pytest.approx(predicted[0], rel=0.02), name
