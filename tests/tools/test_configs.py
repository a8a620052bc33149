"""The packaged configurations: what Megatron makes of them at full size, and that those that are
made tiny train.
"""

import re

import pytest

from cp_ring.tools import job as config
from launch.budget import ROOT
from tests.megatron.launch import trace, train
from tests.tools.commands import told
from tests.tools.tiny_configs import tiny

FULL_SIZE = tuple(name for name in config.packaged() if name not in ("quickstart", "million-cpu"))
RANKS = {"million": 64, "long-tail-64": 64, "qwen3-30b-a3b-128k": 16}  # the others have 8
QUICK = ("gpt-oss-style", "packed-sft-64k")
NOTHING_SAVED = [
    f"megatron.{name}=null" for name in ("save", "load", "tensorboard_dir", "save_interval")
]

LAYERS = "megatron.spec=[tests.parity.recurrent, linear_attention]"  # for those of CUDA alone


def flags(name, device, *overrides):
    """The configuration `name`, which saves nothing, and its flags of Megatron."""
    job = config.load(name, [*NOTHING_SAVED, *overrides])
    return job, config.megatron_flags(job, None, device)[0]


def test_there_are_the_promised_ones():
    table = (ROOT / "docs" / "configurations.md").read_text()
    promised = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert {*promised[: len(config.packaged())]} == {*config.packaged()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.ci if x in QUICK else pytest.mark.slow) for x in FULL_SIZE],
)
def test_a_tiny_form_trains_on_two_ranks(tmp_path, name):
    """That such models train as without context parallelism is held by tests/parity."""
    of_the_cpu = ("num_workers=0", "bf16=false", "transformer_impl=local")
    layers = [LAYERS] * (name == "qwen3-next-style")
    settings = [*tiny(name), *(f"megatron.{x}" for x in of_the_cpu), *layers]
    line = flags(name, "cpu", *settings, f"launch.run_dir={tmp_path}")[1]
    train(2, {name: line}, tmp_path, [], data="documents")
    losses = [step["loss"] for step in trace(tmp_path, name).values()]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_is_what_megatron_accepts_for_nodes_of_8_gpus(megatron, name, tmp_path):
    job, line = flags(name, "cuda", f"launch.run_dir={tmp_path}")
    args, model = megatron(line, job.ranks)
    assert (
        job.ranks == RANKS.get(name, 8)
        and args.data_parallel_size == 1
        and job.launch.device == "cuda"
    )
    assert (
        args.transformer_impl == "transformer_engine"
        and args.bf16
        and args.calculate_per_token_loss
    )
    assert model.context_parallel_size == args.context_parallel_size >= 4
    wrong = {
        key: value for key, value in job.megatron.items() if getattr(args, key, value) != value
    }
    assert wrong.keys() <= {
        "window_size",
        "moe_layer_freq",
        "no_rope_fusion",
        "no_bias_gelu_fusion",
    }
    assert f"--seq-length {args.seq_length}" in " ".join(line) and args.seq_length >= 65536


def test_the_command_of_the_docs_for_8_gpus_is_what_megatron_accepts(megatron):
    page = (ROOT / "docs" / "megatron.md").read_text()
    (found,) = re.findall(r"torchrun --nproc-per-node 8 -m \S+ \S+ (.*?)\n```", page, re.DOTALL)
    args, model = megatron(found.replace("\\\n", "").split(), 8)
    assert (args.cp_ring, args.data_parallel_size, model.num_layers) == (True, 1, 32)


def _recipes():
    table = (ROOT / "docs" / "configurations.md").read_text()
    row = r"^\| `([\w-]+)` \| (\d) \| (.+) \| (\d) \| (\d+) \| ([\d,]+) \|$"
    found = re.findall(row, table, re.MULTILINE)
    return [pytest.param(*x, marks=[] if x[1] == "2" else pytest.mark.slow) for x in found]


@pytest.mark.parametrize("name, nodes, sizes, heads, memory, speed", _recipes())
def test_tune_finds_the_sizes_of_the_recipes(name, nodes, sizes, heads, memory, speed):
    """`tune` asks Megatron whether it accepts them."""
    best = told(f"tune {name} --gpus {8 * int(nodes)}")["best"][0]
    found = " x ".join(f"{x} {best[x]}" for x in ("tp", "cp", "pp", "dp") if best[x] > 1)
    assert (found, best["heads"]) == (sizes, int(heads))
    assert f"{best['bytes'] / 1e9:.0f}" == memory
    assert f"{best['tokens_per_s_per_gpu']:,.0f}" == speed


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_is_planned_and_proven(name):
    assert told(f"plan {name}")["proven_ms"] > 0


@pytest.mark.parametrize(
    "name, layers, windowed",
    [
        ("gpt-oss-style", 24, set(range(1, 24, 2))),
        ("gemma-style-window", 34, set(range(1, 35)) - {6, 12, 18, 24, 30}),
    ],
)
def test_windows_are_on_the_right_layers(megatron, name, layers, windowed, tmp_path):
    from cp_ring.megatron.certificate.layer_kinds import declared_window

    _, model = megatron(flags(name, "cuda", f"launch.run_dir={tmp_path}")[1], ranks=8)
    found = {layer for layer in range(1, layers + 1) if declared_window(model, layer)[0] >= 0}
    assert found == windowed
