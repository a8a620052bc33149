"""From YAML to the command line, checked against Megatron's own parser."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags import argument_parser
from cp_ring.options import SETTINGS, Options
from cp_ring.testing.rank_pool import LIMIT_S
from cp_ring.tools.cli import main
from cp_ring.tools.job import command_line, train
from cp_ring.tools.job import job_config as config


@pytest.fixture(scope="module")
def parser():
    return argument_parser.build_parser()


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"text {index}")
    return folder


def job_of(tmp_path, data, *overrides):
    here = [
        f"data.path={data}",
        f"data.cache={tmp_path / 'cache'}",
        f"launch.run_dir={tmp_path / 'run'}",
    ]
    return config.load("quickstart", [*here, *overrides])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"num_layers": 2, "lr": 1e-3}, ["--num-layers", "2", "--lr", "0.001"]),
        ({"swiglu": True}, ["--swiglu"]),
        ({"swiglu": False}, []),
        ({"no_rope_fusion": True}, ["--no-rope-fusion"]),
        ({"no_rope_fusion": False}, []),
        ({"apply_rope_fusion": False}, ["--no-rope-fusion"]),
        ({"apply_rope_fusion": True}, []),
        ({"min_lr": None}, []),
        ({"data_path": [0.3, "a", 0.7, "b"]}, shlex.split("--data-path 0.3 a 0.7 b")),
        ({"train_data_path": "a"}, ["--train-data-path", "a"]),
        ({"split": "90,5,5"}, ["--split", "90,5,5"]),
        ({"exit_duration_in_mins": -1}, ["--exit-duration-in-mins=-1"]),
    ],
)
def test_settings_to_flags(parser, settings, line):
    assert argument_parser.to_flags(parser, megatron=settings) == line


def test_boolean_optional_flags_have_both_forms(parser):
    action = next(
        action for action in parser._actions if isinstance(action, argparse.BooleanOptionalAction)
    )
    flag = next(option for option in action.option_strings if not option.startswith("--no-"))
    key = flag[2:].replace("-", "_")
    for value in (True, False):
        line = argument_parser.to_flags(parser, megatron={key: value})
        assert getattr(parser.parse_args(line), action.dest) is value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_layer": 2}, ["megatron.num_layer", "no such argument", "num_layers"]),
        ({"zzzzqqq": 2}, ["megatron.zzzzqqq", "no such argument"]),
        ({"swiglu": 3}, ["megatron.swiglu", "true or false", "3"]),
        ({"num_layers": True}, ["megatron.num_layers", "takes a value, not true"]),
        ({"num_layers": [1, 2]}, ["megatron.num_layers", "one value, not 2"]),
        ({"num_layers": {"a": 1}}, ["megatron.num_layers", "not a mapping"]),
        ({"apply_rope_fusion": "no"}, ["megatron.apply_rope_fusion", "'no'"]),
    ],
)
def test_settings_that_megatron_does_not_have(parser, settings, words):
    with pytest.raises(ConfigError) as rejected:
        argument_parser.to_flags(parser, megatron=settings)
    assert "\n" not in str(rejected.value)
    for word in words:
        assert word in str(rejected.value)


def test_quickstart_is_what_megatron_reads(tmp_path, data, parser):
    job = job_of(tmp_path, data, "parallel.tensor_model_parallel_size=2", "cp_ring.num_slots=3")
    corpus = command_line.find_corpus(job)
    assert corpus is not None and not corpus.ready
    built = command_line.build_command(job)
    args = parser.parse_args(built.megatron)
    wrong = {
        key: (value, getattr(args, key))
        for key, value in job.megatron.items()
        if hasattr(args, key) and getattr(args, key) != value
    }
    assert not wrong
    assert (args.context_parallel_size, args.tensor_model_parallel_size) == (2, 2)
    assert args.train_data_path == [corpus.train] and args.tokenizer_model == corpus.tokenizer
    assert args.save == args.load == str(tmp_path / "run" / "checkpoints")
    assert args.cp_ring is True and args.cp_ring_num_slots == "3"
    assert built.torchrun[built.torchrun.index("--nproc-per-node") + 1] == "4"


def test_own_datasets_need_no_corpus(tmp_path, data, parser):
    job = job_of(
        tmp_path,
        data,
        "megatron.mock_data=true",
        "megatron.tokenizer_type=NullTokenizer",
        "megatron.vocab_size=255",
    )
    assert command_line.find_corpus(job) is None
    args = parser.parse_args(command_line.build_command(job).megatron)
    assert (
        args.mock_data and args.train_data_path is None and args.tokenizer_type == "NullTokenizer"
    )


def test_packed_data_sets_mask_documents(tmp_path, data, parser):
    talks = tmp_path / "talks.jsonl"
    talks.write_text("{}")
    packed = [
        "megatron.sft=true",
        f"megatron.data_path=[{talks}]",
        "cp_ring.layout=balanced",
        "cp_ring.pack=fill",
    ]
    args = parser.parse_args(command_line.build_command(job_of(tmp_path, data, *packed)).megatron)
    assert (
        args.sft
        and args.cp_ring_document_mask
        and args.cp_ring_pack == "fill"
        and args.data_path == [str(talks)]
    )
    with pytest.raises(
        ConfigError,
        match=r"megatron.sft needs cp_ring.enabled, which masks documents",
    ):
        command_line.build_command(job_of(tmp_path, data, *packed, "cp_ring.enabled=false"))
    talks.unlink()
    with pytest.raises(ConfigError, match=r"megatron.data_path .*talks\.jsonl: does not exist"):
        command_line.build_command(job_of(tmp_path, data, *packed))


def test_several_nodes(tmp_path, data):
    several = [
        "launch.nnodes=2",
        "launch.node_rank=1",
        "launch.master_addr=10.0.0.1",
        "parallel.data_parallel_size=2",
    ]
    built = command_line.build_command(job_of(tmp_path, data, *several))
    shown = shlex.join(built.torchrun)
    for part in (
        "--nproc-per-node 2",
        "--nnodes 2",
        "--node-rank 1",
        "--master-addr 10.0.0.1",
        "--master-port 29500",
    ):
        assert part in shown
    assert "--standalone" not in shown


REJECTIONS = [
    ("data.path=/nosuch/folder", ["data.path /nosuch/folder", "no such file"]),
    ("megatron.seq_length=2046", ["megatron.seq_length 2046", "parallel.context_parallel_size 2"]),
    ("megatron.context_parallel_size=0", ["context_parallel_size"]),
    ("megatron.lr=fast", ["megatron.lr", "'fast'"]),
    ("megatron.num_layerz=3", ["megatron.num_layerz", "num_layers"]),
    ("cp_ring.layout=spiral", ["cp_ring.layout", "'spiral'"]),
    ("launch.device=cuda", ["launch.device cuda"]),
]


@pytest.mark.parametrize(("override", "words"), REJECTIONS)
def test_rejections_before_any_rank_starts(tmp_path, data, override, words):
    import torch

    if override.startswith("launch.device") and torch.cuda.device_count() > 1:
        pytest.skip("there are enough GPUs")
    with pytest.raises(ConfigError) as rejected:
        job = job_of(tmp_path, data, override)
        command_line.build_command(job)
    assert "\n" not in str(rejected.value)
    for word in words:
        assert word in str(rejected.value)


@pytest.fixture
def cp_ring(monkeypatch, capsys):
    """Runs `cp-ring` in this process; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cp-ring", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path=/nosuch/folder", "/nosuch/folder"),
        ("megatron.seq_length=2046", "quickstart: megatron.seq_length 2046"),
        ("x.y=1", "x: unknown key"),
    ],
)
def test_rejection_is_one_line_and_exit_code_2(cp_ring, override, words):
    code, out, err = cp_ring("train", "quickstart", "--set", override)
    assert code == 2 and not out
    (line,) = err.splitlines()
    assert line.startswith("cp_ring: error: ") and words in line


@pytest.mark.ci
def test_rejection_by_a_real_process():
    line = [
        sys.executable,
        "-m",
        "cp_ring.tools",
        "train",
        "quickstart",
        "--set",
        "megatron.seq_length=2046",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(r"cp_ring: error: .*megatron.seq_length 2046.*\n", done.stderr), done.stderr


def test_dry_run_prints_a_command_that_a_shell_can_run(cp_ring, tmp_path, data, parser):
    run_dir = f"launch.run_dir={tmp_path}/a b"
    code, out, err = cp_ring(
        "train", "quickstart", "--dry-run", "--set", f"data.path={data}", "--set", run_dir
    )
    assert code == 0, err
    words = shlex.split(out)
    assert out.count("\n") == 1 and words[0] == "env"
    module = words.index("cp_ring.pretrain_gpt")
    assert words[module - 1] == "-m"
    args = parser.parse_args(words[module + 1 :])
    assert args.context_parallel_size == 2 and args.save == f"{tmp_path}/a b/checkpoints"
    launcher = next(word for word in words[1:] if "=" not in word)
    assert launcher == sys.executable or Path(launcher).name == "torchrun"
    assert not (tmp_path / "a b").exists()


def test_flags_are_a_table(cp_ring):
    code, out, _ = cp_ring("flags", "--json")
    entries = {entry["flag"]: entry for entry in json.loads(out)}
    assert code == 0 and list(entries) == [Options.flag(name) for name in SETTINGS]
    assert (
        entries["--cp-ring-recompute"]["values"] == "keep, replay"
        and entries["--cp-ring"]["default"] == "off"
    )
    code, out, _ = cp_ring("flags")
    assert code == 0 and all(flag in out for flag in entries)


def test_help_is_quick_and_loads_no_torch(cp_ring):
    code = "import sys, cp_ring.tools.cli\nprint('torch' in sys.modules, 'megatron' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "False",
        "False",
    ]
    code, out, _ = cp_ring("--help")
    assert code == 0 and "train" in out and "patches" in out


def test_patches_command_lists_every_patch(cp_ring, monkeypatch):
    from cp_ring.patches import NAMES

    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = cp_ring("patches")
    assert code == 0
    for name in NAMES:
        assert name in out


def test_every_packaged_configuration_is_valid(tmp_path, data):
    import cp_ring.configs

    files = [file for folder in cp_ring.configs.__path__ for file in Path(folder).glob("*.yaml")]
    assert files
    for file in files:
        assert yaml.safe_load(file.read_text()).keys() <= {
            *config.JobConfig.model_fields,
            "presets",
        }
        job = config.load(
            str(file), [f"data.path={data}", f"data.cache={tmp_path}", f"launch.run_dir={tmp_path}"]
        )
        command_line.build_command(job, elsewhere=True)


@pytest.mark.parametrize(
    ("sharded", "connections"),
    [(None, "1"), ("use_torch_fsdp2", None), ("use_megatron_fsdp", None)],
)
def test_sharded_parameters_get_more_than_one_cuda_connection(monkeypatch, sharded, connections):
    """Megatron asks for one before Blackwell, and rejects one where parameters are sharded."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    job = config.load("quickstart", [f"megatron.{sharded}=true"] if sharded else [])
    assert command_line._environment(job, "cuda").get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "cp_ring.wire=latent",
            "^quickstart: cp_ring.wire latent needs megatron.multi_latent_attention",
        ),
        ("megatron.max_position_embeddings=16", "^quickstart: Megatron rejects it: max_position"),
    ],
)
def test_a_dry_run_says_what_the_ranks_would(tmp_path, data, setting, line):
    """Without its corpus, and with nothing left behind."""
    settings = [setting, f"data.path={data}", f"launch.run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=line):
        train.train("quickstart", settings, dry_run=True)
    assert not (tmp_path / "run").exists()
