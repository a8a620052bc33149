"""`cp-ring tune`: what it prints and writes, and that Megatron accepts what it recommends."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan.costs.search import Given
from cp_ring.tools import job as config
from cp_ring.tools.cli import app
from cp_ring.tools.cli.tune_command import _documents, parse_memory
from cp_ring.tools.tune_job import Request, configured, tune
from tests.tools.test_configs import megatron  # noqa: F401, a fixture

BIG = {
    "llama3-8b-128k": (64, None),
    "deepseek-style-mla-moe": (64, None),
    "packed-sft-64k": (8, "preset:sft"),
}


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], env={"COLUMNS": "120"})


def test_the_tiny_llama_on_four_ranks(tmp_path):
    """Through all doors: JSON, the configuration that it writes, and the picture."""
    target = tmp_path / "my.yaml"
    done = run("llama3-8b-128k", "--set", "preset=tiny", "--gpus", 4, "--seq-length", 1024, "--json",
        "--write", target,
        "--rates", "a100-nvlink-200g", "--lengths", "lognormal:100")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    best = found["best"][0]
    assert len(found["best"]) == 5 and best["tp"] * best["cp"] * best["pp"] * best["dp"] == 4
    assert [way["step_s"] for way in found["best"]] == sorted(
        way["step_s"] for way in found["best"]
    )
    assert best["step_s"] == pytest.approx(sum(best["seconds"].values())) and best["bytes"] == sum(
        best["memory"].values()
    )
    assert found["by_cp"].keys() == {"1", "2", "4"} and any(
        "lognormal:100, packed into 1,024" in x for x in found["assumptions"]
    )
    job = config.load(str(target))
    assert (
        job.parallel.context_parallel_size == best["cp"]
        and job.parallel.ranks == 4
        and job.cp_ring.document_mask
    )
    assert job.megatron["seq_length"] == job.megatron["max_position_embeddings"] == 1024


def test_the_table_names_reasons_and_assumptions():
    done = run("gemma-style-window", "--set", "preset=tiny", "--gpus", 2, "--tp", 1, "--pp", 1)
    assert done.exit_code == 0, done.output
    for words in (
        "predicted, not measured",
        "tokens/s/GPU",
        "Why tp 1 x cp",
        "Assumed:",
        "Megatron's own report",
    ):
        assert words in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 7", "--gpus 7: no sizes"),
        ("--gpus 12", "--gpus 12 is not a multiple of --ranks-per-node 8"),
        ("--gpus 8 --memory 3GB", "--memory 3GB: nothing fits; cp"),
        ("--gpus 8 --memory much", "--memory much: it must be a size"),
        ("--gpus 8 --rates h101", "--rates h101: no such file, nor one of"),
        ("--gpus 8 --lengths preset:poems", "--lengths preset:poems"),
        ("--gpus 8 --write /nowhere/x.yaml", "--write /nowhere/x.yaml: cannot write"),
        ("", "needs a configuration and --gpus"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = run("llama3-8b-128k", "--set", "preset=tiny", *shlex.split(arguments))
    assert isinstance(done.exception, ConfigError | PlanError), done.output
    assert message in str(done.exception) and "\n" not in str(done.exception)


def test_memory_sizes():
    assert [parse_memory(size) for size in ("80", "80GB", "80 gib", "1.5TB")] == [
        80e9,
        80e9,
        80 * 2**30,
        1.5e12,
    ]
    with pytest.raises(PlanError):
        parse_memory("0GB")


def test_recurrent_layers_have_the_faster_way():
    """Two heads do not divide among more ranks, which Megatron wants of the other way alone."""
    job = config.load("qwen3-next-style", [
        "preset=tiny", "megatron.linear_num_key_heads=2", "megatron.linear_num_value_heads=2",
        "megatron.transformer_impl=transformer_engine",
    ])  # fmt: skip
    request = Request(gpus=4, ranks_per_node=4, given=Given(1, 4, 1))
    (way, chosen), *_ = tune(job, request).best
    (linear,) = way.recurrent
    assert (linear.way, linear.layers.count, linear.layers.kind) == ("states", 2, "gdn")
    assert chosen.cp_ring.recurrent == "gdn=states"
    # both layers, forward and backward; the whole forward again where activations are recomputed
    again = 1 if way.recompute == "none" else 1.5
    steps = way.seconds["recurrent layers exchange"] / (2 * linear.cost.seconds * again)
    assert steps == pytest.approx(2 / way.micro_batch)  # microbatches of the global batch


def test_hybrid_models_have_layers_of_several_kinds():
    job = config.load("llama3-8b-128k", [
        "preset=tiny", "megatron.hybrid_layer_pattern='M*-GM-'", "megatron.mamba_num_groups=4",
        "megatron.mamba_head_dim=16", "megatron.mamba_num_heads=8", "launch.device=cuda",
        "megatron.transformer_impl=transformer_engine",
    ])  # fmt: skip
    result = tune(job, Request(gpus=4, ranks_per_node=4, given=Given(2, 2, 1)))
    model, (way, chosen) = result.setup.model, result.best[0]
    assert (model.layers, model.attending, model.dense, model.parts) == (6, 1, 2, 6)
    kinds = {x.layers.kind: x for x in way.recurrent}
    assert {kind: x.layers.count for kind, x in kinds.items()} == {"mamba": 2, "gdn": 1}
    assert chosen.cp_ring.recurrent == f"mamba={kinds['mamba'].way},gdn={kinds['gdn'].way}"
    assert any("no report of hybrid models" in line for line in result.assumptions)
    # of 16 bits; gradients and states of the optimizer are float32, these on two ranks each
    weights = (model.other_parameters + model.embedding_parameters) / 2
    assert way.memory["weights, gradients, optimizer"] == pytest.approx(weights * (6 + 12 / 2))
    alone = tune(job, Request(gpus=1, ranks_per_node=1, given=Given(1, 1, 1))).best[0][0]
    assert [x.cost.memory for x in alone.recurrent] == [0, 0] < [x.kept for x in alone.recurrent]


def test_models_of_unequal_blocks_are_rejected():
    asked = ["preset=tiny", "megatron.heterogeneous_layers_config_path=x.json"]
    with pytest.raises(ConfigError, match="leave out --heterogeneous-layers-config-path"):
        tune(config.load("llama3-8b-128k", asked), Request(gpus=2, ranks_per_node=2))


def test_megatron_is_asked():
    """fp16 and bf16 exclude one another by a rule of Megatron's alone."""
    job = config.load("llama3-8b-128k", ["preset=tiny", "megatron.bf16=true", "megatron.fp16=true"])
    with pytest.raises(ConfigError, match="Megatron rejects all of the"):
        tune(job, Request(gpus=2, ranks_per_node=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_megatron_accepts_the_five_best(megatron, name):  # noqa: F811
    """By the way of a real start: its parser, its validation and its configuration, with cp_ring's
    patches.
    """
    gpus, lengths = BIG[name]
    job = config.load(name)
    documents, origin = _documents(job, lengths, None, 0)
    request = Request(gpus=gpus, documents=documents, of_documents=origin)
    result = tune(job, request)
    assert len(result.best) == 5
    for way, chosen in result.best:
        assert configured(job, way, request) == chosen
        line, _ = config.megatron_flags(chosen, None, "cuda")
        args, model = megatron(line, gpus)
        assert (args.tensor_model_parallel_size, args.context_parallel_size) == way.sizes[:2]
        assert (
            args.data_parallel_size == way.sizes.dp and model.context_parallel_size == way.sizes.cp
        )
