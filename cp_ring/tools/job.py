"""A job's YAML file, and the command line that it stands for: torchrun, `cp_ring.pretrain_gpt`,
Megatron's flags.

Section `megatron` holds Megatron's own arguments; the others are `data`, `cp_ring` and `launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cp_ring.errors import ConfigError, Reasons, one_line
from cp_ring.megatron.options import OptionError, Options, Settings
from cp_ring.options import setting

if TYPE_CHECKING:
    from cp_ring.tools.corpus import Corpus

ENTRY = "cp_ring.pretrain_gpt"
PACKED_DATA = ("sft", "dataloader_inter_document_masking")
"""Arguments of Megatron that ask for data sets of packed documents."""
OWN_DATA = (
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)
"""Arguments of Megatron that name data sets."""
SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Arguments of Megatron whose product is the ranks that hold the model once."""


def _at_home(path: Any) -> Any:
    """Replace ~ by the home directory, as a shell does."""
    return os.path.expanduser(path) if isinstance(path, str) else path


@dataclass(frozen=True)
class DataConfig(Settings):
    """The data to train on. It is unused if `megatron` names data sets of its own (data_path,
    train_data_path, mock_data, ...).
    """

    path: str = setting(
        "",
        "A folder of texts or a .jsonl file; default: Python's standard library.",
        convert=_at_home,
    )
    vocab_size: int = setting(
        4096, "Vocabulary size of the BPE tokenizer that is trained on the data.", least=300
    )
    cache: str = setting("runs/corpora", "Where tokenized corpora are kept.", convert=_at_home)


@dataclass(frozen=True)
class LaunchConfig(Settings):
    """The place where the ranks run and where their output goes."""

    run_dir: str = setting(
        "runs/job", "Checkpoints and logs; default: runs/<name of the file>.", convert=_at_home
    )
    device: str = setting(
        "auto",
        "auto: GPUs with NCCL where there are any, else gloo.",
        choices=("auto", "cpu", "cuda"),
    )
    ranks: int = setting(
        0, "Ranks of all nodes; default: tensor x pipeline x context parallel size.", least=1
    )


@dataclass(frozen=True)
class JobConfig:
    """A whole job. Each key of `megatron` is one of Megatron's arguments (snake_case for
    --snake-case).

    source: the file or the packaged name, for messages. settings: all sections, as they were given.
    """

    source: str
    settings: dict[str, dict[str, Any]]
    megatron: dict[str, Any]
    data: DataConfig
    cp_ring: Options
    launch: LaunchConfig

    @property
    def ranks(self) -> int:
        """The number of ranks of all nodes together."""
        sizes = (self.megatron.get(name) for name in SPLITS)
        return self.launch.ranks or math.prod(size for size in sizes if isinstance(size, int))

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints: megatron.save if it is given."""
        path = self.megatron.get("save") or f"{self.launch.run_dir}/checkpoints"
        return Path(path).expanduser().absolute()


SECTIONS: dict[str, type[Settings] | None] = {
    "megatron": None,
    "data": DataConfig,
    "cp_ring": Options,
    "launch": LaunchConfig,
}
"""The sections of a file, and what reads their keys; those of `megatron` are Megatron's."""


def load(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a job from a file, or by name from the configurations that come with cp_ring, and apply
    `a.b=c` overrides.

    Raises `ConfigError` with one line that names the file or key.
    """
    path = Path(source)
    if not path.is_file():
        known = packaged()
        if source not in known:
            raise ConfigError(
                f"{source}: no such file, nor one of the packaged configurations "
                f"({', '.join(known)})"
            )
        path = known[source]
    try:
        settings = _parsed(path.read_text(errors="replace"), source)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: needs the sections {', '.join(SECTIONS)}")
    for override in overrides:
        _apply_override(settings, override)
    job = validate(settings, source)
    # not among the settings, because another file that they are written to has a name of its own
    launch = {"run_dir": f"runs/{path.stem}"} | settings.get("launch", {})
    return replace(job, launch=LaunchConfig(**launch))


def packaged() -> dict[str, Path]:
    """Return the configurations that come with cp_ring, by name."""
    import cp_ring.configs

    return {
        file.stem: file
        for folder in cp_ring.configs.__path__
        for file in sorted(Path(folder).glob("*.yaml"))
    }


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Reject keys that are given twice, of which YAML takes the last."""
        keys = [str(key.value) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


def _parsed(text: str, what: str) -> Any:
    """Return the value of a YAML text. Raises `ConfigError` that begins with `what`."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{what}: not valid YAML: {one_line(error)[:300]}") from None


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Set `a.b=c` in place. The value is read as YAML: numbers, true, null and [lists] are not
    text.
    """
    name, equals, text = override.partition("=")
    section, _, key = name.partition(".")
    keys = settings.setdefault(section, {})
    if not (equals and section and key and isinstance(keys, dict)):
        raise ConfigError(f"--set {override}: expected section.key=value")
    keys[key] = _parsed(text, f"--set {override[:200]}")


def validate(settings: dict[str, Any], source: str) -> JobConfig:
    """Makes the job. Raises `ConfigError` that names each wrong key."""
    reasons = Reasons()
    for section, given in settings.items():
        with reasons.of():
            if section not in SECTIONS:
                raise ConfigError(
                    f"{source}: there is no section {section}: the file has {', '.join(SECTIONS)}"
                )
            if not isinstance(given, dict):
                raise ConfigError(
                    f"{source}: {section}: must be a section with keys, not {given!r}"
                )
            for key, value in given.items():
                with reasons.of():
                    _check(source, section, key, value)
    reasons.end()
    read = {
        section: kind(**settings.get(section, {})) if kind else settings.get(section, {})
        for section, kind in SECTIONS.items()
    }
    return JobConfig(source, settings, **read)  # type: ignore[arg-type]


def _check(source: str, section: str, key: str, value: Any) -> None:
    """Raise `ConfigError` unless the section can have this value of this key."""
    kind = SECTIONS[section]
    try:
        if kind is not None:
            kind.make(**{str(key): value})
        elif str(key).startswith("cp_ring"):
            raise ConfigError("it belongs in the section cp_ring")
        elif key == "save" and not isinstance(value, str | None):
            raise ConfigError(f"it must be text, not {value!r}")
        if (section, key, value) == ("cp_ring", "cpu", True):
            raise ConfigError("it follows from launch.device: set that")
    except ConfigError as error:
        problem = f"{error.args[2]}, not {value!r}" if isinstance(error, OptionError) else error
        raise ConfigError(f"{source}: {section}.{key}: {problem}") from None


@dataclass(frozen=True)
class Command:
    """A command to run: environment variables, ranks, Megatron's flags. corpus: the texts that it
    trains on, which may not be built yet.
    """

    environment: dict[str, str]
    ranks: int
    flags: list[str]
    corpus: Corpus | None

    def torchrun(self, *more: str) -> list[str]:
        """Return the arguments of torchrun: `more` of its own, and the command of a rank."""
        here = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(self.ranks)]
        return [*here, *more, "-m", ENTRY, *self.flags]

    def as_shell_lines(self) -> str:
        """What a shell can run unchanged, with each flag in a line of its own."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        words = map(shlex.quote, ["env", *variables, *launcher, *self.torchrun()])
        return " ".join(f"\\\n    {word}" if word.startswith("--") else word for word in words)


def uses_corpus(job: JobConfig) -> bool:
    """Return True if the job trains on a corpus that cp_ring builds, not on data sets that
    `megatron` names.
    """
    return not any(job.megatron.get(key) for key in OWN_DATA)


def find_corpus(job: JobConfig) -> Corpus | None:
    """Find the job's corpus without building it; None if the job names data sets of Megatron.

    Raises `ConfigError` for a data path that does not exist or is empty.
    """
    if not uses_corpus(job):
        return None
    from cp_ring.tools import corpus

    data = job.data
    return corpus.find(data.path, data.cache, data.vocab_size)


def build_command(job: JobConfig, here: bool = True) -> Command:
    """Return the command of `job`, checked by cp_ring's rules and by Megatron's parser and
    validation. here: True if this machine runs it; GPUs and packages of another one are unknown.

    Raises `ConfigError` with the reasons, each with its key.
    """
    from cp_ring.megatron.adapter.asked import reject_where
    from cp_ring.megatron.flags.checks_job import layers
    from cp_ring.megatron.validation import rejection

    with named_in(job):
        device, variables = choose_device(job, here)
        corpus = find_corpus(job)
        flags, args = megatron_flags(job, corpus, device)
        reject_where([layers] if here else [], args, job.cp_ring)
        in_a_file = args.use_checkpoint_args or args.yaml_cfg  # the sizes
        if line := "" if in_a_file else rejection(args, job.ranks):
            raise ConfigError(f"Megatron rejects it: {line}")
    return Command(variables, job.ranks, flags, corpus)


@contextlib.contextmanager
def named_in(job: JobConfig) -> Iterator[None]:
    """Let errors name the job and its keys in place of flags."""
    try:
        yield
    except ConfigError as error:
        lines = (_with_keys(str(line)) for line in error.args)
        raise ConfigError(*(f"{job.source}: {line}" for line in lines)) from None


def megatron_flags(
    job: JobConfig,
    corpus: Corpus | None,
    device: str,
    parser: argparse.ArgumentParser | None = None,
) -> tuple[list[str], argparse.Namespace]:
    """Return the flags of `cp_ring.pretrain_gpt` on `device` (cuda or cpu), and what Megatron's
    parser reads from them. They are checked as the ranks check them.

    parser: made by `build_parser` before, for several jobs. Raises `ConfigError`.
    """
    from cp_ring.megatron.flags import argument_parser, resolve
    from cp_ring.megatron.flags.checks_job import JOB, data_files
    from cp_ring.tools.megatron_flags import words_of

    packed = job.cp_ring.enabled and any(job.megatron.get(key) for key in PACKED_DATA)
    options = replace(
        job.cp_ring,
        cpu=device == "cpu",
        document_mask=packed or job.cp_ring.document_mask,
    )
    parser = parser or argument_parser.build_parser()
    settings = _defaults(job, corpus) | job.megatron
    words = (words_of(parser, *setting) for setting in settings.items())
    line = [*itertools.chain(*words), *options.to_args()]
    args = parser.parse_args(line)
    if options.cpu:
        with contextlib.redirect_stdout(io.StringIO()):  # the ranks print what it sets
            resolve.run_on_cpu(args, line)
    resolve.check(args, options, JOB if uses_corpus(job) else (*JOB, data_files))
    return line, args


def _defaults(job: JobConfig, corpus: Corpus | None) -> dict[str, Any]:
    """Return the arguments of Megatron that follow from the other sections. The section `megatron`
    may override them.
    """
    settings: dict[str, Any] = {
        "save": str(job.checkpoints),
        "load": str(job.checkpoints),
        "tensorboard_dir": str(Path(job.launch.run_dir, "tensorboard").absolute()),
        "exit_signal_handler": True,  # on SIGUSR1 and SIGTERM: save, then exit
    }
    if corpus is not None:
        settings |= {
            "train_data_path": corpus.path("train"),
            "valid_data_path": corpus.path("valid"),
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": corpus.path("tokenizer"),
        }
    return settings


def _with_keys(line: str) -> str:
    """Return a line about flags with the keys of a YAML file in their place."""

    def key(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name == "cp_ring":
            return "cp_ring.enabled"
        own = name.removeprefix("cp_ring_")
        return f"cp_ring.{own}" if own != name else f"megatron.{name}"

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]+)", key, line.removeprefix("argument "))


def choose_device(job: JobConfig, here: bool) -> tuple[str, dict[str, str]]:
    """Return `cuda` or `cpu`, and the variables of torchrun and its ranks. A variable that is
    already set keeps its value, but GPUs that the job must not use are hidden.

    Each rank on the CPU gets one thread, because ranks on one machine share its cores. Gloo needs
    the loopback interface by name, because a host name can resolve to an address that no other rank
    listens on. Megatron requires one CUDA connection, and rejects one where parameters are sharded.
    Raises `ConfigError` where this machine runs the job and has too few GPUs.
    """
    import torch

    device, gpus = job.launch.device, torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and here and gpus < job.ranks:
        raise ConfigError(
            f"launch.device {job.launch.device}: this machine has {gpus} GPUs for {job.ranks} "
            "ranks; lower megatron.context_parallel_size or launch.ranks, or set launch.device=cpu"
        )
    variables = {
        "PET_SHUTDOWN_TIMEOUT": "600",  # seconds to save
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }
    if device == "cpu":
        variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    elif not any(job.megatron.get(name) for name in ("use_torch_fsdp2", "use_megatron_fsdp")):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return device, variables | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" and gpus else {})
