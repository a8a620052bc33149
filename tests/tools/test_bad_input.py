"""Bad launch and config inputs: each is rejected in one line that names the setting, before any
rank starts.
"""

import shlex
import subprocess
import sys

import pytest
import yaml

from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.tools.cli import app
from tests.tools.slurm.job import TINY

# Of `cp-ring train`: an override, and the words that the rejection must have beside its key.
TRAIN = [
    ("megatron.num_layer=2", "num_layers"),
    ("megatron.num_layers=two", "'two'"),
    ("megatron.num_layers={a: 1}", "not a whole number"),
    ("megatron.num_layers=true", "expected one argument"),
    ("megatron.num_layers=false", "expected one argument"),
    ("megatron.swiglu=3", "ignored explicit argument"),
    ("megatron.apply_rope_fusion=3", "unrecognized"),
    ("megatron.position_embedding_type=spiral", "'spiral'"),
    ("megatron.lr=fast", "'fast'"),
    ("megatron.seq_length=33", "seq-length should be a multiple of 2"),
    ("megatron.window_size=16,4", ""),
    ("megatron.cp_comm_type=pigeon", "pigeon"),
    ("megatron.cp_ring_layout=zigzag", "section cp_ring"),
    ("megatron.hybrid_context_parallel=true", ""),
    ("megatron.fp8_dot_product_attention=true", ""),
    ("megatron.mock_data=false", "data.path"),
    ("megatron.distributed_backend=nccl", "megatron.distributed_backend nccl | gloo"),
    ("megatron.train_data_path=/nosuch/data", "megatron.train_data_path /nosuch/data"),
    ("megatron.context_parallel_size=0", "0"),
    ("megatron.context_parallel_size=four", "'four'"),
    ("parallel.tensor=4", "no section parallel: the file has megatron, data, cp_ring, launch"),
    ("preset=tiny", "--set preset=tiny: expected section.key=value"),
    ("launch.ranks=-1", "-1"),
    ("cp_ring.kernel=magic", "'magic'"),
    ("cp_ring.beneath=magic", "it must be 'te'"),
    ("cp_ring.schedule=[0,2,2,2]", "it leaves out hop 1"),
    ("cp_ring.schedule=[0,1,2,3,4,5,6]", "cp_ring.schedule 0,1,2,3,4,5,6 | 7 hops for"),
    ("cp_ring.num_slots=1", "1"),
    ("cp_ring.slots=2", "num_slots"),
    ("cp_ring.cpu=true", "launch.device"),
    ("data.vocab_size=12", "12"),
    ("data.pth=x", "known are path, vocab_size, cache"),
    ("launch.device=tpu", "'tpu'"),
    ("launch.max_restarts=-1", "known are run_dir, device, ranks"),
    ("launch.run_dir=[a]", "launch.run_dir: it must be text, not ['a']"),
    ("megatron.num_layers=null", "Megatron rejects it: either num-layers"),
    ("megatron.save={a: 1}", "it must be text, not {'a': 1}"),
    ("megatron.x", "--set megatron.x | section.key=value"),
    ("=1", "--set =1 | section.key=value"),
    ("megatron.num_layers.deep=1", "megatron.num_layers.deep | unrecognized"),
    ("megatron.lr=[1", "--set megatron.lr=[1 | YAML"),
    ("megatron.lr=" + "[" * 10000, "--set megatron.lr | not valid YAML"),
]

# Of these, whose rejection names another key.
OTHER_KEYS = (
    "megatron.mock_data=false",
    "megatron.num_layers=null",
    "megatron.seq_length=33",
    "parallel.tensor=4",
)

FILES = [
    ("a: [1,\nb: }", "not valid YAML"),
    ("- megatron", "needs the sections"),
    ("# to do", "needs the sections"),
    ("megatrom:\n  num_layers: 1", "megatrom | megatron"),
    ("parallel: 4", "there is no section parallel: the file has"),
    ("megatron: 3", "megatron | 3"),
    ("launch:\n  device:\n", "launch.device"),
    ("\xff\xfe", "not valid YAML | needs the sections"),
    ("[" * 5000, "not valid YAML"),
    ("cp_ring:\n  cpu: true\ncp_ring:\n  wire: int8", "not valid YAML: given twice: cp_ring"),
    ("megatron: {1: 2}", "unrecognized arguments"),
    ('a: !!python/object/apply:os.system ["exit 3"]', "not valid YAML: could not determine"),
]

# What typer rejects, and `main` says: a whole command line.
USAGE = [
    ("plan --seq-length 8 --cp abc", "--cp | integer"),
    ("plan --cp 2", "--seq-length"),
    ("plan --nosuch", "--nosuch"),
    ("plan --seq-length 8 --cp 0", "--cp | 1"),
    ("plan --seq-length 8 --cp 2 --ranks-per-node 0", "--ranks-per-node | 1"),
    ("tune llama3-8b-128k --gpus 0", "--gpus | 1"),
    ("nosuch", "nosuch"),
    ("bench attention --cp 0", "--cp | 1"),
    ("bench attention --repeats 0", "--repeats | 1"),
    ("bench host --repeats 0", "--repeats | 1"),
]

UNREADABLE = "/proc/self/mem"  # a regular file; to read its first page is an error, for root too


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


@pytest.fixture
def no_rank(monkeypatch):
    """Nothing may be started."""
    from cp_ring.tools import train

    monkeypatch.setattr(train, "run", lambda *given: pytest.fail(f"started: {given}"))


def rejection(*line):
    """The lines with which the command is rejected; `main` prints each after `cp_ring: error: `
    and exits with 2.
    """
    with pytest.raises((ConfigError, PlanError, KernelError)) as rejected:
        app(list(line), standalone_mode=False)
    lines = [" ".join(str(reason).split()) for reason in rejected.value.args]
    assert lines and all(line and len(line) < 450 for line in lines)
    return " ".join(lines)


def named(message, words):
    missing = [word for word in words.split(" | ") if word not in message]
    assert not missing, f"{message!r} lacks {missing}"


@pytest.mark.parametrize("override, words", TRAIN, ids=[override[:60] for override, _ in TRAIN])
def test_train(file, no_rank, monkeypatch, tmp_path, override, words):
    monkeypatch.chdir(tmp_path)
    more = ["--set", "data.path=/nosuch"] if "mock_data" in override else []
    key = override.partition("=")[0]
    message = rejection("train", file, "--set", override, *more)
    named(message, words)
    assert key in message or override in OTHER_KEYS
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text, words", FILES)
def test_file(no_rank, monkeypatch, tmp_path, text, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    message = rejection("train", str(path))
    assert str(path) in message and any(word in message for word in words.split(" | ")), message


def test_unreadable_file(no_rank):
    named(rejection("train", UNREADABLE), f"{UNREADABLE}: cannot be read")


def test_a_model_from_elsewhere_needs_no_sizes(file, no_rank, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "max_position_embeddings",
    )
    no_sizes = [word for key in sizes for word in ("--set", f"megatron.{key}=null")]
    for override in ("megatron.use_checkpoint_args=true", "megatron.yaml_cfg=model.yaml"):
        app(["train", file, *no_sizes, "--set", override, "--dry-run"], standalone_mode=False)
    app(
        ["train", file, *no_sizes[:2], "--set", "megatron.hybrid_layer_pattern='*-'", "--dry-run"],
        standalone_mode=False,
    )
    assert capsys.readouterr().out.count("env ") == 3


@pytest.mark.parametrize("line, words", USAGE)
def test_usage(cp_ring, line, words):
    code, _, said = cp_ring(*shlex.split(line))
    assert code == 2
    *_, message = said.splitlines()
    assert message.startswith(("cp_ring: error: ", "Error: "))
    named(message, words)


@pytest.mark.parametrize("line", ["plan --cp 4 --seq-length 64k", "flags"])
def test_a_full_disk_is_one_line(line):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cp_ring.tools", *line.split()],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    wanted = "cp_ring: error: the output cannot be written: No space left on device\n"
    assert done.stderr == wanted


@pytest.mark.parametrize(
    "settings, wrong",
    [
        (["cp_ring.num_slots=0", "cp_ring.zz=1", "launch.nnodes=0"],
         ["cp_ring.num_slots: ", "cp_ring.zz: ", "launch.nnodes: no setting"]),
        (["cp_ring.wire=latent", "data.path=/nosuch"], ["data.path /nosuch: "]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "train --dry-run"])
def test_all_reasons_at_once(no_rank, cp_ring, command, settings, wrong):
    """Each in a line."""
    name, *options = command.split()
    given = [f"--set={setting}" for setting in settings]
    code, _, said = cp_ring(name, "quickstart", *options, *given)
    lines = said.splitlines()
    assert code == 2 and len(lines) == len(wrong)
    for text in wrong:
        assert [each for each in lines if each.startswith(f"cp_ring: error: quickstart: {text}")]
