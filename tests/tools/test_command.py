"""From YAML to the command line, checked against Megatron's own parser."""

import argparse
import shlex
import subprocess
import sys

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags import argument_parser
from cp_ring.megatron.options import SETTINGS, Options
from cp_ring.tools import job as jobs
from cp_ring.tools import train
from cp_ring.tools.megatron_flags import words_of
from tests.rings import refused


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
    return jobs.load("quickstart", [*here, *overrides])


@pytest.mark.parametrize(
    "settings, line",
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
        (
            {"split": [90, 5, 5], "window_size": [128, 0]},
            shlex.split("--split 90,5,5 --window-size 128,0"),
        ),
        ({"window_size": [-1, 0]}, ["--window-size=-1,0"]),
        ({"moe_layer_freq": [0, 1, 1]}, ["--moe-layer-freq", "[0,1,1]"]),
        ({"recompute_modules": ["mlp", "moe"]}, ["--recompute-modules", "mlp", "moe"]),
        ({"exit_duration_in_mins": -1}, ["--exit-duration-in-mins=-1"]),
        ({"load": "~/ck"}, ["--load", "/home/me/ck"]),
        ({"data_path": ["~/a", "b"]}, ["--data-path", "/home/me/a", "b"]),
    ],
)
def test_settings_to_flags(parser, monkeypatch, settings, line):
    monkeypatch.setenv("HOME", "/home/me")
    assert [
        word for key, value in settings.items() for word in words_of(parser, key, value)
    ] == line


@pytest.mark.parametrize("value, shown", [("warp", "warp"), (["a", "b"], "[a,b]")])
def test_a_value_that_a_flag_does_not_know_is_one_line(parser, value, shown):
    line = refused(ConfigError, parser.parse_args, words_of(parser, "attention_backend", value))
    assert line == f"argument --attention-backend: invalid choice: '{shown}'"


def test_boolean_optional_flags_have_both_forms(parser):
    action = next(
        action for action in parser._actions if isinstance(action, argparse.BooleanOptionalAction)
    )
    flag = next(option for option in action.option_strings if not option.startswith("--no-"))
    key = flag[2:].replace("-", "_")
    for value in (True, False):
        line = words_of(parser, key, value)
        assert getattr(parser.parse_args(line), action.dest) is value


def test_quickstart_is_what_megatron_reads(tmp_path, data, parser):
    job = job_of(tmp_path, data, "megatron.tensor_model_parallel_size=2", "cp_ring.num_slots=3")
    corpus = jobs.find_corpus(job)
    assert corpus is not None and not corpus.ready
    built = jobs.build_command(job)
    args = parser.parse_args(built.flags)
    wrong = {
        key: (value, getattr(args, key))
        for key, value in job.megatron.items()
        if hasattr(args, key) and getattr(args, key) != value
    }
    assert not wrong
    assert (args.context_parallel_size, args.tensor_model_parallel_size) == (2, 2)
    assert args.train_data_path == [corpus.path("train")] and args.tokenizer_model == corpus.path(
        "tokenizer"
    )
    assert args.save == args.load == str(tmp_path / "run" / "checkpoints")
    assert args.cp_ring is True and args.cp_ring_num_slots == "3"
    assert built.ranks == 4


def test_packed_data_sets_mask_documents(tmp_path, data, parser):
    talks = tmp_path / "talks.jsonl"
    talks.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    packed = [
        "megatron.sft=true",
        f"megatron.data_path=[{talks}]",
        "cp_ring.layout=balanced",
        "cp_ring.pack=fill",
    ]
    args = parser.parse_args(jobs.build_command(job_of(tmp_path, data, *packed)).flags)
    assert (
        args.sft
        and args.cp_ring_document_mask
        and args.cp_ring_pack == "fill"
        and args.data_path == [str(talks)]
    )
    alone = ["cp_ring.enabled=false", "megatron.context_parallel_size=1"]
    megatron_alone = jobs.build_command(job_of(tmp_path, data, *packed, *alone))
    assert not parser.parse_args(megatron_alone.flags).cp_ring_document_mask
    talks.unlink()
    with pytest.raises(ConfigError, match=r"megatron.data_path .*talks\.jsonl: does not exist"):
        jobs.build_command(job_of(tmp_path, data, *packed))


BENCHES = "bench attention", "bench host"


def by_a_shell(line):
    """The words that bash reads."""
    program = f"set -- {line.strip()}; printf '%s\\n' \"$@\""
    return subprocess.check_output(["bash", "-c", program], text=True).splitlines()


def test_dry_run_prints_a_command_that_a_shell_can_run(cp_ring, tmp_path, data, parser):
    run_dir = f"launch.run_dir={tmp_path}/a b"
    code, out, err = cp_ring(
        "train", "quickstart", "--dry-run", "--set", f"data.path={data}", "--set", run_dir
    )
    assert code == 0, err
    words = by_a_shell(out)
    assert words[0] == "env"
    module = words.index("cp_ring.pretrain_gpt")
    assert words[module - 1] == "-m"
    args = parser.parse_args(words[module + 1 :])
    assert args.context_parallel_size == 2 and args.save == f"{tmp_path}/a b/checkpoints"
    assert next(word for word in words[1:] if "=" not in word) == sys.executable
    assert not (tmp_path / "a b").exists()


def test_print_flags_is_a_flag_a_line_that_a_shell_can_run(cp_ring, tmp_path, data):
    given = ["train", "quickstart", "--print-flags", "--set", f"data.path={data}"]
    given += ["--set", f"launch.run_dir={tmp_path}/a b", "--set", f"data.cache={tmp_path}/cache"]
    code, out, err = cp_ring(*given)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("env ") and " -m cp_ring.pretrain_gpt \\" in out
    assert all(line.startswith("    --") for line in lines[1:]) and "    --num-layers 4 \\" in lines
    job = jobs.load("quickstart", [word for word in given if "=" in word])
    built = jobs.build_command(job)
    assert by_a_shell(out) == by_a_shell(built.as_shell_lines())
    assert built.corpus.ready and "corpus" in err


def test_flags_are_read_at_80_columns(cp_ring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cp_ring("flags")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for name in SETTINGS:
        assert f"  {Options.flag(name)}" in out
    assert "(default: keep; one of keep," in " ".join(out.split())


@pytest.mark.parametrize(
    "command",
    ["", "train", "plan", "tune", "doctor", "flags", "bench", *BENCHES],
)
def test_help_fits_a_terminal(cp_ring, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cp_ring(*command.split(), "--help")
    assert code == 0 and "Usage: cp-ring" in out and "..." not in out.partition("Commands:")[2]
    assert len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 80


def test_the_version_is_that_of_the_package(cp_ring):
    from cp_ring import __version__

    assert cp_ring("--version")[:2] == (0, f"cp_ring {__version__}\n")


def test_help_is_quick_and_loads_no_torch(cp_ring):
    code = "import sys, cp_ring.tools.cli\nprint('torch' in sys.modules, 'megatron' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "False",
        "False",
    ]
    code, out, _ = cp_ring("--help")
    assert code == 0 and "train" in out and "doctor" in out


@pytest.mark.parametrize(
    "sharded, connections",
    [(None, "1"), ("use_torch_fsdp2", None), ("use_megatron_fsdp", None)],
)
def test_sharded_parameters_get_more_than_one_cuda_connection(monkeypatch, sharded, connections):
    """Megatron asks for one before Blackwell, and rejects one where parameters are sharded."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    given = [f"megatron.{sharded}=true"] if sharded else []
    job = jobs.load("quickstart", ["launch.device=cuda", *given])
    _, variables = jobs.choose_device(job, here=False)
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


@pytest.mark.parametrize(
    "setting, line",
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
