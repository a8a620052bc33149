"""A job's YAML file, and the command line that it stands for: torchrun, `cp_ring.pretrain_gpt`,
Megatron's flags.

Section `megatron` holds Megatron's own arguments; the others are `data`, `cp_ring` and `launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cp_ring.errors import ConfigError, Reasons, one_line
from cp_ring.megatron.options import SETTINGS, OptionError, Options
from cp_ring.options import LEFT as LEFT_SETTINGS

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
_SECTION = "must be a section with keys"
_PLAIN = {
    "model_type": _SECTION,
    "dict_type": _SECTION,
    "dataclass_type": _SECTION,
    "path_type": "must be a path",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "string_type": "must be text",
}  # plain text for pydantic's types of errors
_LAUNCHER = dict.fromkeys(
    ("nnodes", "node_rank", "master_addr", "master_port", "max_restarts"),
    "several nodes and restarts are those of launch/slurm/train.sbatch, or of torchrun with the "
    "flags of cp-ring train --print-flags",
)
_DATA = {"validation_fraction": "one of 20 documents is for validation; drop it"}
_PRESETS = "a variant is a file of its own, or --set of each key"
_SECTIONS = {
    "parallel": "its sizes are keys of section megatron; in place of data_parallel_size give "
    "launch.ranks, the number of all ranks",
    "presets": _PRESETS,
    "preset": _PRESETS,
}
LEFT = {"": _SECTIONS, "launch": _LAUNCHER, "cp_ring": LEFT_SETTINGS, "data": _DATA}
"""Sections and their keys that left, and what to use instead."""
SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Arguments of Megatron whose product is the ranks that hold the model once."""


UserPath = Annotated[
    Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))
]  # ~ is the home directory, as in a shell


def _read_options(section: Any, as_pydantic: Callable[[Any], Options]) -> Options:
    """The section cp_ring, which `Options` checks itself; its errors get pydantic's form."""
    if not isinstance(section, dict):
        return as_pydantic(section)
    known = {key: value for key, value in section.items() if key in SETTINGS}
    errors = [
        InitErrorDetails(type="extra_forbidden", loc=(key,), input=section[key])
        for key in section.keys() - known
    ]
    try:
        options = Options(**known)
    except OptionError as error:
        kind = PydanticCustomError("option", "{problem}", {"problem": error.problem})
        errors.append(InitErrorDetails(type=kind, loc=(error.name,), input=error.value))
    if errors:
        raise ValidationError.from_exception_data("cp_ring", errors)
    return options


class Section(BaseModel):
    """A section of the file; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """What to train on. Unused where `megatron` names datasets of its own (data_path,
    train_data_path, mock_data, ...).
    """

    path: UserPath | None = Field(
        None, description="A folder of texts or a .jsonl file; default: Python's standard library."
    )
    vocab_size: int = Field(
        4096,
        ge=300,
        description="Vocabulary size of the BPE tokenizer that is trained on the data.",
    )
    cache: UserPath = Field(Path("runs/corpora"), description="Where tokenized corpora are kept.")


class LaunchConfig(Section):
    """Where the ranks run and where their output goes."""

    run_dir: UserPath = Field(
        Path("runs/job"), description="Checkpoints and logs; default: runs/<name of the file>."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: GPUs with NCCL where there are any, else gloo."
    )
    ranks: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="Ranks of all nodes; default: tensor x pipeline x context parallel size.",
    )


class JobConfig(Section):
    """A whole job. `megatron` maps one to one to Megatron's arguments (snake_case for
    --snake-case).
    """

    megatron: dict[str, Any] = Field(default_factory=dict)
    data: DataConfig = DataConfig()  # type: ignore[call-arg]
    cp_ring: Annotated[Options, WrapValidator(_read_options)] = Options()
    launch: LaunchConfig = LaunchConfig()  # type: ignore[call-arg]
    _source: str = ""

    @property
    def source(self) -> str:
        """The file or the packaged name, for messages."""
        return self._source

    @property
    def ranks(self) -> int:
        """Ranks of all nodes together."""
        sizes = (self.megatron.get(name) for name in SPLITS)
        return self.launch.ranks or math.prod(size for size in sizes if isinstance(size, int))

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are saved: megatron.save if it is given."""
        return Path(self.megatron.get("save") or self.launch.run_dir / "checkpoints").absolute()


def load(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job from a file, or by name from the configurations that come with cp_ring, and
    applies `a.b=c` overrides.

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
        settings = _parsed(path.read_text(errors="replace"), source) or {}
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: needs the sections {', '.join(JobConfig.model_fields)}")
    for override in overrides:
        _apply_override(settings, override)
    launch = settings.setdefault("launch", {})
    if isinstance(launch, dict):
        launch.setdefault("run_dir", f"runs/{path.stem}")
    return validate(settings, source)


def packaged() -> dict[str, Path]:
    """The configurations that come with cp_ring, by name."""
    import cp_ring.configs

    return {
        file.stem: file
        for folder in cp_ring.configs.__path__
        for file in sorted(Path(folder).glob("*.yaml"))
    }


def _parsed(text: str, what: str) -> Any:
    """The value of a YAML text. Raises `ConfigError` that begins with `what`."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{what}: not valid YAML: {one_line(error)[:300]}") from None


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in place. The value is read as YAML: numbers, true, null and [lists] are not
    text.
    """
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and section and bool(dot) == bool(key)):
        raise ConfigError(f"--set {override}: expected section.key=value")
    value = _parsed(text, f"--set {override[:200]}")
    if not dot:
        settings[section] = value
    elif isinstance(keys := settings.get(section) or {}, dict):
        settings[section] = {**keys, key: value}
    else:
        raise ConfigError(f"--set {override}: {section} is not a section")


def validate(settings: dict[str, Any], source: str) -> JobConfig:
    """Makes the job. Raises `ConfigError` that names each wrong key, with similar known ones."""
    try:
        job = JobConfig.model_validate(settings)
    except ValidationError as error:
        lines = [_describe(each) for each in error.errors()]
        raise ConfigError(*(f"{source}: {line}" for line in lines)) from None
    lines = [
        f"megatron.{key} belongs in the section cp_ring"
        for key in job.megatron
        if key.startswith("cp_ring")
    ]
    lines += ["cp_ring.cpu follows from launch.device: set that"] * job.cp_ring.cpu
    if lines:
        raise ConfigError(*(f"{source}: {line}" for line in lines))
    job._source = source
    return job


def _describe(error: Any) -> str:
    """One of pydantic's errors in one line."""
    location = [str(part) for part in error["loc"]]
    key, last = ".".join(location), location[-1]
    if error["type"] != "extra_forbidden":
        message = error["msg"] if error["type"] == "option" else error["msg"].lower()
        return f"{key}: {_PLAIN.get(error['type'], message)}, not {error['input']!r}"
    section = ".".join(location[:-1])
    if last in LEFT.get(section, ()):
        return f"{key} left cp_ring: {LEFT[section][last]}"
    sections = {
        name: getattr(field.annotation, "model_fields", SETTINGS)
        for name, field in JobConfig.model_fields.items()
    }
    names = [*(sections[section] if section else sections)]
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if near:
        return f"{key}: unknown key; did you mean {'.'.join([*location[:-1], near[0]])}?"
    return f"{key}: unknown key; {section or 'the file'} has {', '.join(names)}"


@dataclass(frozen=True)
class Command:
    """What to run: environment variables, ranks, Megatron's flags. corpus: what it trains on, which
    may not be built yet.
    """

    environment: dict[str, str]
    ranks: int
    flags: list[str]
    corpus: Corpus | None

    def words(self, *torchrun: str) -> list[str]:
        """The whole command, with more options of torchrun."""
        here = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(self.ranks)]
        launcher = ["-m", "torch.distributed.run", *here, *torchrun]
        return [sys.executable, *launcher, "-m", ENTRY, *self.flags]

    def as_shell_lines(self, of_one_rank: bool = False) -> str:
        """What a shell can run unchanged, with each of Megatron's flags in a line of its own. That
        of one rank, which Slurm starts, has no torchrun.
        """
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        whole = ["env", *variables, *replace(self, flags=[]).words()]
        words = map(shlex.quote, self.flags)
        flags = (f"\\\n    {word}" if word.startswith("--") else word for word in words)
        start = [sys.executable, "-m", ENTRY] if of_one_rank else whole
        return " ".join([shlex.join(start), *flags])


def uses_corpus(job: JobConfig) -> bool:
    """Whether the job trains on a corpus that cp_ring builds, not on datasets that `megatron`
    names.
    """
    return not any(job.megatron.get(key) for key in OWN_DATA)


def find_corpus(job: JobConfig) -> Corpus | None:
    """The job's corpus, which this finds but does not build; None where the job names Megatron
    datasets of its own.

    Raises `ConfigError` for a data path that does not exist or is empty.
    """
    if not uses_corpus(job):
        return None
    from cp_ring.tools import corpus

    data = job.data
    return corpus.find(data.path, data.cache, data.vocab_size)


def build_command(job: JobConfig, elsewhere: bool = False, slurm: bool = False) -> Command:
    """The command of `job`, checked by cp_ring's rules and by Megatron's parser and validation.
    With `elsewhere`, another machine runs it; its GPUs and packages are unknown here. With `slurm`,
    this machine has some of the ranks.

    Raises `ConfigError` with all reasons, each with its key.
    """
    from cp_ring.megatron.flags.asked import reject_where
    from cp_ring.megatron.flags.checks_job import layers
    from cp_ring.megatron.validation import rejection

    reasons = Reasons()
    with _keys_of(job):
        device, corpus = "cpu", None
        with reasons.of():
            device, variables = choose_device(job, elsewhere, slurm)
        with reasons.of():
            corpus = find_corpus(job)
        with reasons.of():
            flags, args = megatron_flags(job, corpus, device)
            with reasons.of():
                reject_where([] if elsewhere else [layers], args, job.cp_ring)
            in_a_file = args.use_checkpoint_args or args.yaml_cfg  # the sizes
            if line := "" if in_a_file else rejection(args, job.ranks):
                raise ConfigError(f"Megatron rejects it: {line}")
        reasons.end()
    return Command(variables, job.ranks, flags, corpus)


def megatron_flags(
    job: JobConfig,
    corpus: Corpus | None,
    device: str,
    parser: argparse.ArgumentParser | None = None,
) -> tuple[list[str], argparse.Namespace]:
    """The flags of `cp_ring.pretrain_gpt` on `device` (cuda or cpu), and what Megatron's parser
    reads from them. They are checked as the ranks do it.

    parser: made by `build_parser` before, for several jobs. Raises as `build_command` does.
    """
    from cp_ring.megatron.flags import resolve
    from cp_ring.megatron.flags.checks_job import JOB, data_files
    from cp_ring.megatron.flags.codec_choice import check_latent
    from cp_ring.tools import megatron_flags

    packed = job.cp_ring.enabled and any(job.megatron.get(key) for key in PACKED_DATA)
    options = replace(
        job.cp_ring,
        cpu=device == "cpu",
        document_mask=packed or job.cp_ring.document_mask,
    )
    parser = parser or megatron_flags.build_parser()
    with _keys_of(job):
        settings = _defaults(job, corpus) | job.megatron
        line = megatron_flags.to_flags(parser, settings)
        line += options.to_args()
        args = megatron_flags.check(parser, line)
        if options.cpu:
            with contextlib.redirect_stdout(io.StringIO()):  # the ranks print what it sets
                resolve.run_on_cpu(args, line)
        reasons = Reasons()
        with reasons.of():
            resolve.check(args, options, JOB if uses_corpus(job) else (*JOB, data_files))
        with reasons.of():
            if options.enabled and args.context_parallel_size > 1:
                check_latent(args, options.heads if isinstance(options.heads, int) else 1, options)
        reasons.end()
    return line, args


def _defaults(job: JobConfig, corpus: Corpus | None) -> dict[str, Any]:
    """Megatron arguments that follow from the other sections. The section `megatron` may override
    them.
    """
    settings: dict[str, Any] = {
        "save": str(job.checkpoints),
        "load": str(job.checkpoints),
        "tensorboard_dir": str((job.launch.run_dir / "tensorboard").absolute()),
        "exit_signal_handler": True,  # on SIGUSR1 and SIGTERM: save, then exit
    }
    if corpus is not None:
        settings |= {
            "train_data_path": corpus.train,
            "valid_data_path": corpus.valid,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": corpus.tokenizer,
        }
    return settings


def _with_keys(line: str) -> str:
    """A line about flags, with the keys of a YAML file in their place."""

    def key(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name == "cp_ring":
            return "cp_ring.enabled"
        own = name.removeprefix("cp_ring_")
        return f"cp_ring.{own}" if own != name else f"megatron.{name}"

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]+)", key, line.removeprefix("argument "))


@contextlib.contextmanager
def _keys_of(job: JobConfig) -> Iterator[None]:
    """Errors name the file, and its keys in place of flags."""
    try:
        yield
    except ConfigError as error:
        named, lines = f"{job.source}: ", map(str, error.args)
        raise ConfigError(
            *(line if line.startswith(named) else named + _with_keys(line) for line in lines)
        ) from None


def choose_device(
    job: JobConfig, elsewhere: bool = False, slurm: bool = False
) -> tuple[str, dict[str, str]]:
    """`cuda` or `cpu`, and the variables of torchrun and its ranks. A variable that is already set
    keeps its value, but GPUs that the job must not use are hidden.

    Each rank on the CPU gets one thread, because ranks on one machine share its cores. Gloo needs
    the loopback interface by name, because a host name can resolve to an address that no other rank
    listens on. Megatron requires one CUDA connection, and rejects one where parameters are sharded.
    Raises `ConfigError` where the machine has too few GPUs for launch.device cuda.
    """
    import torch

    asked, gpus = job.launch.device, torch.cuda.device_count()
    needed = 1 if slurm else job.ranks
    if asked == "cuda" and gpus < needed and not (elsewhere or slurm):
        raise ConfigError(
            f"launch.device cuda: this machine has {gpus} GPUs for {needed} ranks; lower "
            "megatron.context_parallel_size or launch.ranks, or set launch.device=cpu"
        )
    variables = {
        "PET_SHUTDOWN_TIMEOUT": "600",  # seconds to save
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }
    device = "cuda" if asked == "cuda" or (asked == "auto" and gpus >= needed) else "cpu"
    if device == "cpu":
        variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    elif not any(job.megatron.get(name) for name in ("use_torch_fsdp2", "use_megatron_fsdp")):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    if device == "cpu" and gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        if asked == "auto":
            print(
                f"cp_ring: {gpus} GPUs are too few for {needed} ranks: running on the CPU",
                file=sys.stderr,
            )
    return device, variables
