"""The packaged configurations: what Megatron makes of them at full size, and how those that are
made tiny train.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_ring import patches
from cp_ring.tools import job as config
from cp_ring.tools.cli import app
from tests.megatron.launch import trace, train
from tests.tools.tiny_configs import tiny

FULL_SIZE = tuple(name for name in config.packaged() if name not in ("quickstart", "million-cpu"))
QUICK = ("gpt-oss-style", "packed-sft-64k")
STOCK = ["cp_ring.enabled=false"]
REFERENCE = ["cp_ring.kernel=reference"]  # where stock attention has no such model on the CPU
BASELINE = {
    "llama3-8b-128k": STOCK,
    "qwen3-style-gqa-262k": STOCK,
    "qwen3-next-style": REFERENCE,
    "gpt-oss-style": STOCK,
    "gemma-style-window": STOCK,
    "deepseek-style-mla-moe": REFERENCE,
    "packed-sft-64k": REFERENCE,
    "million": [*STOCK, "cp_ring.loss_chunk=0"],
}
NOTHING_SAVED = [
    f"megatron.{name}=null" for name in ("save", "load", "tensorboard_dir", "save_interval")
]

LAYERS = "megatron.spec=[tests.parity.recurrent, linear_attention]"  # for those of CUDA alone


def flags(name, device, *overrides):
    """The configuration `name`, which saves nothing, and its flags of Megatron."""
    job = config.load(name, [*NOTHING_SAVED, *overrides])
    return job, config.megatron_flags(job, None, device)[0]


def test_there_are_the_promised_ones():
    assert set(FULL_SIZE) == set(BASELINE)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """What `tiny_runs` does for the configurations of the default run."""
    return tiny_runs(tmp_path_factory.mktemp("configs"), QUICK)


@pytest.fixture(scope="module")
def more_traces(tmp_path_factory):
    """What `tiny_runs` does for the other configurations."""
    return tiny_runs(
        tmp_path_factory.mktemp("more_configs"), [name for name in FULL_SIZE if name not in QUICK]
    )


def tiny_runs(folder, names):
    """Each configuration made tiny, at context parallel size 2, and at 1: two
    launches.
    """

    def flags_of(name, job, *overrides):
        return flags(
            name,
            "cpu",
            *tiny(name),
            "megatron.num_workers=0",
            "megatron.bf16=false",
            "megatron.transformer_impl=local",
            f"launch.run_dir={folder / job}",
            *[LAYERS] * (name == "qwen3-next-style"),
            *overrides,
        )[1]

    train(
        2,
        {name: flags_of(name, name) for name in names},
        folder,
        [],
        data=dict.fromkeys(names, "documents"),
    )
    one = "megatron.context_parallel_size=1"
    baselines = {
        f"{name}-cp1": flags_of(name, f"{name}-cp1", one, *BASELINE[name]) for name in names
    }
    train(1, baselines, folder, [], data=dict.fromkeys(baselines, "documents"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FULL_SIZE if name not in QUICK])
def test_more_train_as_without_context_parallelism(more_traces, name):
    test_tiny_trains_as_without_context_parallelism(more_traces, name)


@pytest.mark.ci
@pytest.mark.parametrize("name", QUICK)
def test_tiny_trains_as_without_context_parallelism(traces, name):
    ours, theirs = trace(traces, name), trace(traces, f"{name}-cp1")
    assert list(ours) == list(theirs) == [1, 2, 3, 4, 5]
    assert ours[5]["loss"] < ours[1]["loss"] - 0.01
    for step, wanted in theirs.items():
        assert ours[step]["loss"] == pytest.approx(wanted["loss"], rel=1e-5), step
        assert ours[step]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), step


@pytest.fixture
def megatron(monkeypatch):
    """Makes Megatron's settings of a job; TransformerEngine counts as installed where they ask."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from cp_ring.megatron import compat

    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(moe_utils, f"fused_{name}", object())
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("cpu_runtime", "arguments"):
        patches.get(name).apply()
    arguments = importlib.import_module("megatron.training.arguments")

    def make(line, ranks):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(
            sys, "argv", ["pretrain_gpt", *line, "--no-create-attention-mask-in-dataloader"]
        )
        args = arguments.parse_args()
        arguments.validate_args(args)
        return args, arguments.core_transformer_config_from_args(args)

    yield make
    for name in reversed(patches.applied()):
        patches.get(name).revert()


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_is_what_megatron_accepts_for_nodes_of_8_gpus(megatron, name, tmp_path):
    job, line = flags(name, "cuda", f"launch.run_dir={tmp_path}")
    args, model = megatron(line, job.ranks)
    assert (
        job.ranks == (64 if name == "million" else 8)
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
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    (found,) = re.findall(r"torchrun --nproc-per-node 8 -m \S+ \S+ (.*?)\n```", page, re.DOTALL)
    args, model = megatron(found.replace("\\\n", "").split(), 8)
    assert (args.cp_ring, args.data_parallel_size, model.num_layers) == (True, 1, 32)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_is_planned_and_proven(name):
    done = CliRunner().invoke(app, ["plan", name, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["proven_ms"] > 0


@pytest.mark.parametrize(
    ("name", "layers", "windowed"),
    [
        ("gpt-oss-style", 24, set(range(1, 24, 2))),
        ("gemma-style-window", 34, set(range(1, 35)) - {6, 12, 18, 24, 30}),
    ],
)
def test_windows_are_on_the_right_layers(megatron, name, layers, windowed, tmp_path):
    from cp_ring.megatron import compat

    _, model = megatron(flags(name, "cuda", f"launch.run_dir={tmp_path}")[1], ranks=8)
    assert {layer for layer in range(1, layers + 1) if compat.has_window(model, layer)} == windowed


@pytest.mark.slow
def test_the_same_losses_at_cp_2_and_4(tmp_path):
    """The million tokens of the CPU, on fewer: documents, a window, the loss in
    chunks.
    """
    for cp in (2, 4):
        sizes = [
            f"megatron.context_parallel_size={cp}",
            "megatron.seq_length=16384",
            f"launch.run_dir={tmp_path}",
        ]
        train(cp, {f"cp{cp}": flags("million-cpu", "cpu", *sizes)[1]}, tmp_path, [])
    two, four = trace(tmp_path, "cp2"), trace(tmp_path, "cp4")
    assert list(two) == list(four) == [1, 2, 3]
    for step, wanted in two.items():
        assert four[step]["loss"] == pytest.approx(wanted["loss"], rel=1e-6), step
        assert four[step]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), step
