"""`cp-ring tune`: the search, the time and the memory of a step, what it prints and writes, and that
Megatron accepts what it recommends.
"""

import argparse
import errno
import json
import shlex
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from pytest import approx
from typer.testing import CliRunner

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.recurrent_choice import mixers
from cp_ring.megatron.validation import rejection
from cp_ring.plan.sizes.attention_sizes import AttentionSizes, LatentSizes
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.recurrent.choice import MixerSizes
from cp_ring.tools import job as jobs
from cp_ring.tools.cli import app
from cp_ring.tools.tune import (
    attention_costs,
    configured,
    possible_sizes,
    search,
    tune,
)
from cp_ring.tools.tune_model import (
    RECOMPUTE,
    Experts,
    ModelSizes,
    ParallelSizes,
    Request,
    TrainingSetup,
    model_sizes,
    step_memory,
    step_seconds,
    weight_bytes,
)
from tests.megatron import recurrent_layers
from tests.rings import refused
from tests.tools.tiny_configs import tiny, tiny_words

MODEL = ModelSizes(
    layers=4,
    networks=4,
    hidden=512,
    ffn=1408,
    vocabulary=4096,
    layer=AttentionSizes(8, 2, 64, 64),
    windows=(((-1, -1), 4),),
)
LATENT = replace(MODEL, layer=AttentionSizes(8, 8, 96, 64, latent=LatentSizes(64, 32, 64, 64)))
SLOW = replace(RATES, forward=1e14, backward=1e14, products=1.5e14, inside=2e10, between=2e9)
SETUP = TrainingSetup(
    model=MODEL, seq_length=8192, global_batch=8, gpus=8, ranks_per_node=4, rates=SLOW, memory=80e9
)
BIG = {
    "llama3-8b-128k": (64, None),
    "deepseek-style-mla-moe": (64, None),
    "packed-sft-64k": (8, "lognormal:4000"),
}


def ways_of(**given):
    return search(replace(SETUP, **given))


def costs_of(setup=SETUP):
    return attention_costs(setup)(1, 8)


def test_the_order_is_that_of_the_times():
    every = ways_of()
    assert len(every) > 15 and [way.step for way in every] == sorted(way.step for way in every)
    assert {way.sizes.tp for way in ways_of(tp=2)} == {2}


def test_sizes_multiply_to_the_gpus_and_divide_the_model():
    for tp, cp, pp, dp in possible_sizes(SETUP):
        assert tp * cp * pp * dp == 8 and tp <= 4 and 4 % pp == 0 and 8 % dp == 0
    with_experts = replace(SETUP, model=replace(MODEL, experts=Experts(8, 4, 2, 256, parallel=4)))
    assert {sizes.pp for sizes in possible_sizes(with_experts)} == {1, 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gpus": 7}, "^--gpus 7: no sizes of tp, cp up to 256, pp and dp have this product"),
        ({"tp": 3}, "^--tp 3: it does not divide the 8 GPUs of --gpus"),
        ({"cp": 0}, "^--cp 0: it does not divide"),
        ({"tp": 8}, "^--gpus 8: no sizes of tp, cp up to 256, pp and dp with tp 8 "),
    ],
)
def test_what_does_not_factor_is_rejected(changes, message):
    with pytest.raises(PlanError, match=message):
        possible_sizes(replace(SETUP, **changes))


def test_memory_decides_what_is_recomputed():
    sizes = ParallelSizes(1, 8, 1, 1)
    cost = costs_of()[0]
    needs = [sum(step_memory(SETUP, sizes, how, cost).values()) for how in RECOMPUTE]
    assert needs == sorted(needs, reverse=True)
    for limit, how in zip(needs, RECOMPUTE, strict=True):
        assert ways_of(memory=limit + 1, tp=1, cp=8, pp=1)[0].recompute == how
    assert "nothing fits; tp 4 x cp 2 x pp 1 x dp 1 needs least" in refused(
        ConfigError, ways_of, memory=1e9
    )


def test_the_time_of_a_pipeline():
    """Stages of t and a last one of t + l: m microbatches take (m - 1)(t + l) + pp t + l."""
    setup = replace(SETUP, rates=replace(RATES, inside=1e30, between=1e30, memory=1e30))
    attention = (1.0, 3.5, 0.0, 0.0)
    one = step_seconds(setup, ParallelSizes(1, 4, 1, 2), "none", attention)
    two = step_seconds(setup, ParallelSizes(1, 4, 2, 1), "none", attention)
    layers, logits = (one["attention"] + one["other layers"]) / 4, one["output layer"] / 4
    assert one["attention"] == approx(4 * 3.5)
    assert sum(one.values()) == approx(4 * (layers + logits))
    stage = layers / 2
    assert sum(two.values()) == approx(7 * (stage + logits) + 2 * stage + logits)


def test_slow_links_make_latents_and_heads_worth_it():
    slow = replace(SETUP, seq_length=4096, rates=replace(SLOW, inside=2e11, between=2e8))
    latent, plain = (costs_of(replace(slow, model=model))[0] for model in (LATENT, MODEL))
    assert latent.wire == "latent" and (plain.wire, plain.heads) == ("plain", 4)


KINDS = {
    "plain": "--group-query-attention --num-query-groups 2",
    "swiglu": "--group-query-attention --num-query-groups 2 --swiglu",
    "experts with a gate of quick GeGLU": "--quick-geglu --num-experts 4",
    "experts beside a shared one": (
        "--swiglu --num-experts 4 --moe-shared-expert-intermediate-size 96"
    ),
    "multi-latent": (
        "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 48 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --rope-type rope"
    ),
}
SIZES = """--num-layers 3 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 320
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --disable-bias-linear
    --untie-embeddings-and-output-weights --bf16 --cp-ring --cp-ring-cpu --train-iters 1
    --moe-router-topk 2 --tokenizer-type NullTokenizer --vocab-size 511 --attention-dropout 0"""


class NoAttention(torch.nn.Module):
    """In place of core attention, which has no weights; Megatron's own has no latents."""

    def __init__(self, *args, **kwargs):
        super().__init__()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_model_that_megatron_builds(one_rank, megatron, monkeypatch, kind):
    """All but norms: within 1 percent."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # MLA asks without a GPU too
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    args, config = megatron([*SIZES.split(), *KINDS[kind].split()], 1)
    latent = args.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        args.num_experts, multi_latent_attention=latent, qk_layernorm=latent
    )
    spec.submodules.self_attention.submodules.core_attention = NoAttention
    built = GPTModel(
        config,
        spec,
        512,
        64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    counted = sum(weight.numel() for weight in built.parameters())
    setup = replace(SETUP, model=model_sizes(args, (((-1, -1), 3),), 512), gpus=1)
    by_model = weight_bytes(setup, ParallelSizes(1, 1, 1, 1)) / 18
    assert by_model == approx(counted, rel=0.01)


@pytest.mark.parametrize("kind, letter", [("mamba", "M"), ("gated delta net", "G")])
def test_projections_of_recurrent_layers_are_those_of_megatrons_classes(one_rank, kind, letter):
    config = recurrent_layers.configuration()
    args = argparse.Namespace(**vars(config), hybrid_layer_pattern=letter + "*-")
    built = recurrent_layers.build(kind)
    count = sum(part.weight.numel() for part in (built.in_proj, built.out_proj))
    ((_, sizes),) = mixers(Asked(args))
    assert count == sizes.channels * config.hidden_size


def test_recurrent_layers_cost_parts_time_and_messages():
    """A hybrid of 2 attention layers, 4 recurrent ones and 6 networks."""
    mixer = MixerSizes(heads=8, k=64, v=64, channels=8 * 64 * 5, units=8)
    windows = (((-1, -1), 2),)
    model = replace(MODEL, layers=12, networks=6, windows=windows, recurrent=((mixer, 4),))
    setup = replace(SETUP, model=model)
    assert model.parts == 12
    assert model.other_parameters - replace(model, recurrent=()).other_parameters == (
        4 * 512 * mixer.channels
    )
    one, two, three = (
        step_seconds(setup, ParallelSizes(1, cp, 1, 8 // cp), "none", (0.0,) * 4)
        for cp in (1, 2, 4)
    )
    assert "recurrent messages" not in one and two["recurrent messages"] > 0
    assert one["recurrent layers"] == approx(three["recurrent layers"])
    only = replace(setup, model=replace(model, recurrent=((replace(mixer, units=3), 4),)))
    states = step_seconds(only, ParallelSizes(1, 2, 1, 4), "none", (0.0,) * 4)
    assert states["recurrent messages"] >= two["recurrent messages"]
    sizes = possible_sizes(only)
    assert {one.tp for one in sizes} == {1}


def test_a_hybrid_whose_heads_do_not_divide_is_tuned(megatron):
    """On 64 ranks the 16 key heads do not: Megatron's validation must not reject it."""
    asked = ["megatron.linear_num_key_heads=3", "megatron.linear_num_value_heads=3"]
    result = tune(
        jobs.load("qwen3-next-style", [*tiny("qwen3-next-style"), *asked]),
        Request(gpus=2, ranks_per_node=2, cp=2),
    )
    assert (
        not any("rejects" in note for note in result.notes)
        and result.best[0][0].seconds["recurrent messages"] > 0
    )


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_only_states_need_no_divided_heads(enabled):
    """Without --cp-ring the ranks would meet Megatron's own check."""
    asked = ["context_parallel_size=32", "expert_model_parallel_size=8"]
    overrides = [f"cp_ring.enabled={enabled}", *(f"megatron.{x}" for x in asked)]
    job = jobs.load("qwen3-next-style", overrides)
    line = rejection(jobs.megatron_flags(job, None, "cuda")[1], job.ranks)
    assert ("linear_num_key_heads" in line) is (enabled == "false")


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], env={"COLUMNS": "120"})


def test_the_tiny_llama_on_four_ranks(tmp_path):
    """Through all doors: JSON, and the configuration that it writes."""
    target = tmp_path / "my.yaml"
    line = "--gpus 4 --set megatron.seq_length=1024 --set megatron.max_position_embeddings=1024"
    line += " --json --device a100"
    done = run(
        *tiny_words("llama3-8b-128k"),
        *line.split(),
        "--lengths",
        "lognormal:100",
        "--write",
        target,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    best = found["best"][0]
    assert len(found["best"]) == 5 and best["tp"] * best["cp"] * best["pp"] * best["dp"] == 4
    steps = [way["step_s"] for way in found["best"]]
    assert steps == sorted(steps) and best["step_s"] == approx(sum(best["seconds"].values()))
    assert best["bytes"] == sum(best["memory"].values())
    assert any("lognormal:100, packed into 1,024" in x for x in found["notes"])
    job = jobs.load(str(target))
    assert job.megatron["context_parallel_size"] == best["cp"]
    assert job.ranks == 4 and job.cp_ring.document_mask
    assert job.megatron["seq_length"] == 1024
    assert job.launch.run_dir == "runs/my"
    for way in found["best"]:
        of_messages = sum(s for name, s in way["seconds"].items() if "messages" in name)
        waits = way["seconds"]["attention waits"]
        assert way["exposed_s"] == approx(of_messages + waits)
    assert any(way["seconds"]["attention waits"] for way in found["best"])


@pytest.mark.parametrize("command, option", [("tune", "--write"), ("plan", "--draw")])
def test_files_are_written_before_a_reader_of_the_output_ends(
    tmp_path, monkeypatch, command, option
):
    ended = Mock(side_effect=BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr(f"cp_ring.tools.{command}.emit", ended)
    gpus = ["--gpus", "2"] if command == "tune" else []
    words = [command, *tiny_words("llama3-8b-128k"), *gpus, option, f"{tmp_path}/x.svg"]
    assert CliRunner().invoke(app, words).exit_code == 1
    assert ended.called and (tmp_path / "x.svg").stat().st_size


def test_the_table_and_its_notes():
    done = run(*tiny_words("gemma-style-window"), "--gpus", 2, "--tp", 1, "--pp", 1)
    assert done.exit_code == 0, done.output
    for words in (
        "predicted, not measured",
        "tokens/s/GPU",
        "exposed, s",
        "  activations",
        "- assumed: a rank",
    ):
        assert words in done.output
    [step] = [line for line in done.output.splitlines() if line.startswith("step, s")]
    assert all(float(cell) > 0 for cell in step.split()[2:]), step


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--gpus 12", "--gpus 12 is not a multiple of --ranks-per-node 8"),
        ("--gpus 8 --memory 3", "--memory 3: nothing fits; tp"),
        *(
            (
                f"--gpus {gpus} --set megatron.seq_length=131071",
                "context-parallel ranks cannot split 131,071 tokens, but they can split "
                f"megatron.seq_length={lengths}",
            )
            for gpus, lengths in (("8", "131056 or 131072"), ("2 --memory 3", "131068 or 131072"))
        ),
        *(
            (f"--gpus 8 --set megatron.{each}", f"needs megatron.{each.split('=')[0]}: give a")
            for each in ("num_layers=null", "hidden_size=null", "expert_model_parallel_size=0")
        ),
        ("--gpus 8 --set megatron.save_interval=", "give megatron.save_interval, the steps"),
        ("--gpus 8 --set megatron.micro_batch_size=3", "in microbatches of 3"),
        ("--gpus 8 --device h101", "--device h101: known are"),
        ("--gpus 8 --lengths preset:sft", "--lengths preset:sft: neither"),
        ("--gpus 8 --write /nowhere/x.yaml", "--write /nowhere/x.yaml: cannot write"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = run(*tiny_words("llama3-8b-128k"), *shlex.split(arguments))
    assert isinstance(done.exception, ConfigError | PlanError), done.output
    assert message in str(done.exception) and "\n" not in str(done.exception)


@pytest.mark.parametrize(
    "setting, flag",
    [
        ("heterogeneous_layers_config_path=x.json", "--heterogeneous-layers-config-path"),
        ("hybrid_layer_pattern=MD*-", "--hybrid-layer-pattern MD*-"),
        ("hybrid_layer_pattern=M-", "--hybrid-layer-pattern M-"),
    ],
)
def test_layers_without_known_times_are_rejected(setting, flag):
    asked = [*tiny("llama3-8b-128k"), f"megatron.{setting}"]
    job = jobs.load("llama3-8b-128k", asked)
    line = refused(ConfigError, tune, job, Request(gpus=2, ranks_per_node=2))
    assert f"leave out {flag}" in line


def test_megatron_is_asked():
    """fp16 and bf16 exclude one another by a rule of Megatron's alone."""
    job = jobs.load(
        "llama3-8b-128k", [*tiny("llama3-8b-128k"), "megatron.bf16=true", "megatron.fp16=true"]
    )
    assert "Megatron rejects the sizes of all" in refused(
        ConfigError, tune, job, Request(gpus=2, ranks_per_node=2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_megatron_accepts_the_five_best(megatron, name):
    """By the way of a real start: its parser, its validation and its configuration, with cp_ring's
    patches.
    """
    gpus, lengths = BIG[name]
    job = jobs.load(name)
    result = tune(job, Request(gpus, lengths=lengths))
    assert len(result.best) == 5
    for way, chosen in result.best:
        for section in ("megatron", "launch"):
            assert configured(job, way).settings[section] == chosen.settings[section]
        line, _ = jobs.megatron_flags(chosen, None, "cuda")
        args, model = megatron(line, gpus)
        assert (args.tensor_model_parallel_size, args.context_parallel_size) == way.sizes[:2]
        assert args.data_parallel_size == way.sizes.dp
        assert model.context_parallel_size == way.sizes.cp
