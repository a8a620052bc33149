"""A job's YAML file, and the command line that it stands for: torchrun, `cp_ring.pretrain_gpt`,
Megatron's flags.

Its sections are `megatron`, `data`, `parallel`, `cp_ring` and `launch`. One more, `presets`, names
variants of the job: `presets.tiny.megatron.num_layers: 2` applies if `preset=tiny` is among the
overrides. A preset changes the keys that it has, and null removes a key.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
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
from cp_ring.options import LEFT as LEFT_SETTINGS
from cp_ring.options import SETTINGS, OptionError, Options

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
}  # plain text for pydantic's types of errors
_LAUNCHER = dict.fromkeys(
    ("nnodes", "node_rank", "master_addr", "master_port", "max_restarts"),
    "several nodes and restarts are those of launch/slurm/train.sbatch, or of torchrun with the "
    "flags of cp-ring train --print-flags",
)
_DATA = {"validation_fraction": "one of 20 documents is for validation; drop it"}
LEFT = {"launch": _LAUNCHER, "cp_ring": LEFT_SETTINGS, "data": _DATA}
"""Keys of sections that left, and what to use instead."""


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


class ParallelConfig(Section):
    """The size of each parallel dimension. Their product is the number of ranks."""

    model_config = ConfigDict(strict=True)  # true is no 1

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int = Field(1, ge=1)
    data_parallel_size: int = Field(
        1, ge=1, description="Not a Megatron argument: Megatron divides the ranks by the others."
    )

    @property
    def ranks(self) -> int:
        """Ranks of all nodes together."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )


class LaunchConfig(Section):
    """Where the ranks run and where their output goes."""

    run_dir: UserPath = Field(
        Path("runs/job"), description="Checkpoints and logs; default: runs/<name of the file>."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: GPUs with NCCL where there are any, else gloo."
    )


class JobConfig(Section):
    """A whole job. `megatron` maps one to one to Megatron's arguments (snake_case for
    --snake-case).
    """

    megatron: dict[str, Any] = Field(default_factory=dict)
    data: DataConfig = DataConfig()  # type: ignore[call-arg]
    parallel: ParallelConfig = ParallelConfig()  # type: ignore[call-arg]
    cp_ring: Annotated[Options, WrapValidator(_read_options)] = Options()
    launch: LaunchConfig = LaunchConfig()  # type: ignore[call-arg]
    _source: str = ""

    @property
    def source(self) -> str:
        """The file or the packaged name, for messages."""
        return self._source

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are saved: megatron.save if it is given."""
        return Path(self.megatron.get("save") or self.launch.run_dir / "checkpoints").absolute()


def load(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job from a file, or by name from the configurations that come with cp_ring, and
    applies `a.b=c` overrides.

    `preset=NAME` among the overrides chooses a variant from the file's section `presets`. The
    output of a variant goes to a folder of its own.

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
    settings = _read(path, source)
    presets = settings.pop("presets", None) or {}
    chosen = [
        override.partition("=")[2] for override in overrides if override.startswith("preset=")
    ]
    if chosen:
        settings = _merged(settings, _find_preset(presets, chosen[-1], source))
    for override in overrides:
        if not override.startswith("preset="):
            _apply_override(settings, override)
    launch = settings.setdefault("launch", {})
    if isinstance(launch, dict):
        launch.setdefault("run_dir", "-".join([f"runs/{path.stem}", *chosen[-1:]]))
    return validate(settings, source)


def packaged() -> dict[str, Path]:
    """The configurations that come with cp_ring, by name."""
    import cp_ring.configs

    return {
        file.stem: file
        for folder in cp_ring.configs.__path__
        for file in sorted(Path(folder).glob("*.yaml"))
    }


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {one_line(error)}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: needs the sections {', '.join(JobConfig.model_fields)}")
    return settings


def _find_preset(presets: Any, name: str, source: str) -> dict[str, Any]:
    if not isinstance(presets, dict) or not isinstance(presets.get(name), dict):
        known = ", ".join(presets) if isinstance(presets, dict) and presets else "none"
        raise ConfigError(
            f"{source}: no preset {name!r} in its section presets; there are: {known}"
        )
    return dict(presets[name])


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`settings` with the keys of `changes` in place of its own; nested sections are merged in the
    same way.
    """
    merged = dict(settings)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = (
            _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in place. The value is read as YAML: numbers, true, null and [lists] are not
    text.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"--set {override[:200]}: the value is not valid YAML: {one_line(error)[:300]}"
        ) from None
    *sections, last = key.split(".")
    place = settings
    for section in sections:
        inner = place.get(section)
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
        place = inner
    place[last] = value


def validate(settings: dict[str, Any], source: str) -> JobConfig:
    """Makes the job. Raises `ConfigError` that names each wrong key, with similar known ones."""
    try:
        job = JobConfig.model_validate(settings)
    except ValidationError as error:
        lines = [_describe(each) for each in error.errors()]
        raise ConfigError(*(f"{source}: {line}" for line in lines)) from None
    lines = [
        f"megatron.{key} belongs in its own section: set parallel.{key}"
        for key in job.megatron
        if key in ParallelConfig.model_fields
    ]
    lines += [
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
    if last in LEFT.get(location[0], ()):
        return f"{key} left cp_ring: {LEFT[location[0]][last]}"
    sections = {
        name: getattr(field.annotation, "model_fields", SETTINGS)
        for name, field in JobConfig.model_fields.items()
    }
    names = [*(sections[location[0]] if location[1:] else sections)]
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if near:
        return f"{key}: unknown key; did you mean {'.'.join([*location[:-1], near[0]])}?"
    return f"{key}: unknown key; {'.'.join(location[:-1]) or 'the file'} has {', '.join(names)}"


@dataclass(frozen=True)
class Command:
    """What to run: environment variables, options of `torchrun`, Megatron's flags. corpus: what it
    trains on, which may not be built yet.
    """

    environment: dict[str, str]
    torchrun: list[str]
    flags: list[str]
    corpus: Corpus | None

    def launcher(self, *more: str) -> list[str]:
        """torchrun, with more options."""
        return [sys.executable, "-m", "torch.distributed.run", *self.torchrun, *more]

    def words(self, *torchrun: str) -> list[str]:
        """The whole command, with more options of torchrun."""
        return [*self.launcher(*torchrun), "-m", ENTRY, *self.flags]

    def as_shell_lines(self, of_one_rank: bool = False) -> str:
        """What a shell can run unchanged, with each of Megatron's flags in a line of its own. That
        of one rank, which Slurm starts, has no torchrun.
        """
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        launcher = [sys.executable] if of_one_rank else ["env", *variables, *self.launcher()]
        words = map(shlex.quote, self.flags)
        flags = (f"\\\n    {word}" if word.startswith("--") else word for word in words)
        return " ".join([shlex.join([*launcher, "-m", ENTRY]), *flags])


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


def build_command(job: JobConfig, elsewhere: bool = False, tasks: int | None = None) -> Command:
    """The command of `job`, checked by cp_ring's rules and by Megatron's parser and validation.
    With `elsewhere`, another machine runs it; its GPUs and packages are unknown here. tasks: how
    many ranks Slurm starts on all nodes.

    Raises `ConfigError` with all reasons, each with its key.
    """
    from cp_ring.megatron.flags import rules
    from cp_ring.megatron.flags.rule import Job, check_rules

    reasons = Reasons()
    device = "cuda" if job.launch.device == "cuda" else "cpu"
    visible: dict[str, str] = {}
    flags: list[str] = []
    corpus = args = None
    with reasons.of(), _keys_of(job):
        device, visible = choose_device(job, elsewhere, tasks)
    with reasons.of(), _keys_of(job):
        corpus = find_corpus(job)
    with reasons.of():
        flags, args = megatron_flags(job, corpus, device)
    if args is not None:
        if not elsewhere:
            with reasons.of(), _keys_of(job):
                check_rules(Job(args), rules.LAYERS)
        with reasons.of():
            _check_by_megatron(job, args)
    reasons.end()
    torchrun = ["--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(job.parallel.ranks)]
    return Command(_environment(job, device) | visible, torchrun, flags, corpus)


def megatron_flags(
    job: JobConfig,
    corpus: Corpus | None,
    device: str,
    parser: argparse.ArgumentParser | None = None,
) -> tuple[list[str], argparse.Namespace]:
    """The flags of `cp_ring.pretrain_gpt` on `device` (cuda or cpu), and what Megatron's parser
    reads from them.

    parser: made by `build_parser` before, for several jobs. Raises as `build_command` does.
    """
    from cp_ring.megatron.flags import argument_parser

    packed = job.cp_ring.enabled and any(job.megatron.get(key) for key in PACKED_DATA)
    options = replace(
        job.cp_ring,
        cpu=device == "cpu",
        document_mask=packed or job.cp_ring.document_mask,
    )
    parser = parser or argument_parser.build_parser()
    sizes = job.parallel.model_dump(exclude={"data_parallel_size"})
    with _keys_of(job):
        settings = _defaults(job, corpus) | job.megatron
        line = argument_parser.to_flags(parser, parallel=sizes, megatron=settings)
        line += options.to_args()
        args = argument_parser.check(parser, line)
        _run_rank_checks(args, job, options, line)
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


def _run_rank_checks(
    args: argparse.Namespace,
    job: JobConfig,
    options: Options,
    line: list[str],
) -> None:
    """Runs the ranks' own checks of the flags in `line` once, before any rank starts."""
    from cp_ring.megatron.flags import rules, validate
    from cp_ring.megatron.flags.codec_choice import check_latent
    from cp_ring.megatron.flags.rule import Job

    args.world_size = job.parallel.ranks
    flags = Job(args, options, line)
    if "--cp-ring-cpu" in line:
        with contextlib.redirect_stdout(io.StringIO()):  # the ranks print what it sets
            validate.run_on_cpu(flags)
    data = () if uses_corpus(job) else rules.DATA
    reasons = Reasons()
    with reasons.of():
        validate.check_job(flags, rules.COMPLETE + rules.TRAINING + data)
    with reasons.of():
        if options.enabled and flags.cp > 1:
            check_latent(args, options.heads if isinstance(options.heads, int) else 1, options)
    reasons.end()


def _check_by_megatron(job: JobConfig, args: argparse.Namespace) -> None:
    """Raises `ConfigError` with the line of Megatron's own validation, where it rejects `args`."""
    from cp_ring.megatron.flags import acceptance
    from cp_ring.megatron.flags.rule import Job

    if Job(args).sizes_from_a_file:
        return
    if line := acceptance.rejection(args, job.parallel.ranks):
        raise ConfigError(f"{job.source}: Megatron rejects it: {as_keys(line)}")


def as_keys(line: str) -> str:
    """A line about flags, with the keys of a YAML file in their place."""

    def key(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name == "cp_ring":
            return "cp_ring.enabled"
        own = name.removeprefix("cp_ring_")
        section = "parallel" if name in ParallelConfig.model_fields else "megatron"
        return f"cp_ring.{own}" if own != name else f"{section}.{name}"

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]+)", key, line.removeprefix("argument "))


@contextlib.contextmanager
def _keys_of(job: JobConfig) -> Iterator[None]:
    """Errors name the file, and its keys in place of flags."""
    try:
        yield
    except ConfigError as error:
        lines = (as_keys(line) for line in error.args)
        raise ConfigError(*(f"{job.source}: {line}" for line in lines)) from None


def choose_device(
    job: JobConfig, elsewhere: bool = False, tasks: int | None = None
) -> tuple[str, dict[str, str]]:
    """`cuda` or `cpu`, and the variables that hide GPUs that the job must not use.

    Raises `ConfigError` where the machine has too few GPUs for launch.device cuda, and where
    Slurm's `tasks` are not the ranks of the job.
    """
    import torch

    asked, ranks = job.launch.device, job.parallel.ranks
    if tasks is not None and tasks != ranks:
        raise ConfigError(
            f"{tasks} tasks, but the sizes in section parallel make {ranks} ranks: ask Slurm for "
            "as many tasks, or change parallel.data_parallel_size"
        )
    if elsewhere and asked == "cuda":
        return "cuda", {}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if tasks is not None:  # Slurm has given each its part of a node
        return "cuda" if asked == "cuda" or (asked == "auto" and gpus) else "cpu", {}
    if asked == "cuda" and gpus < ranks:
        raise ConfigError(
            f"launch.device cuda: this machine has {gpus} GPUs for {ranks} ranks (the product of "
            "the sizes in section parallel); lower a size or set launch.device=cpu"
        )
    device = "cpu" if asked == "cpu" or gpus < ranks else "cuda"
    if device == "cpu" and gpus and asked == "auto":
        print(
            f"cp_ring: {gpus} GPUs are too few for {ranks} ranks: running on the CPU",
            file=sys.stderr,
        )
    return device, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" and gpus else {}


def _environment(job: JobConfig, device: str) -> dict[str, str]:
    """Variables of torchrun and its ranks. A variable that is already set keeps its value.

    Each rank gets one thread, because ranks on one machine share its cores. Gloo needs the loopback
    interface by name, because a host name can resolve to an address that no other rank listens on.
    Megatron requires one CUDA connection, and rejects one where parameters are sharded.
    """
    variables = {}
    if device == "cpu":
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    elif not any(job.megatron.get(name) for name in ("use_torch_fsdp2", "use_megatron_fsdp")):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # time to save
    variables |= {
        "PET_SHUTDOWN_TIMEOUT": "600",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }
    return {name: os.environ.get(name, value) for name, value in variables.items()}
