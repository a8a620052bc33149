"""Makes the command line that runs a job: torch's launcher, the entry module of cp_ring, Megatron's
flags.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_ring.errors import ConfigError, Reasons
from cp_ring.megatron.flags.rule import Job, check_rules
from cp_ring.options import Options
from cp_ring.tools.job.job_config import JobConfig, ParallelConfig

if TYPE_CHECKING:
    from cp_ring.tools.job.corpus import Corpus

ENTRY = "cp_ring.pretrain_gpt"
# which ask for data sets of packed documents
PACKED_DATA = ("sft", "dataloader_inter_document_masking")
OWN_DATA = (
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)


RANK_BYTES = 1 << 29
"""Of memory that a rank on the CPU takes at least."""


@dataclass(frozen=True)
class Command:
    """What to run: environment variables, options of `torchrun`, the entry module with its own
    arguments, Megatron's flags. corpus: what it trains on, which may not be built yet.
    """

    environment: dict[str, str]
    torchrun: list[str]
    megatron: list[str]
    corpus: Corpus | None
    entry: tuple[str, ...] = (ENTRY,)

    def of_one_rank(self) -> str:
        """The command of a rank that Slurm starts, as a line of a shell."""
        return shlex.join([sys.executable, "-m", *self.entry, *self.megatron])

    @property
    def arguments(self) -> list[str]:
        """All arguments of torchrun."""
        return [*self.torchrun, "-m", *self.entry, *self.megatron]

    def as_shell_line(self) -> str:
        """One line that a shell can run unchanged."""
        program = Path(sys.executable).with_name("torchrun")
        torchrun = (
            [str(program)] if program.exists() else [sys.executable, "-m", "torch.distributed.run"]
        )
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join(["env", *variables, *torchrun, *self.arguments])


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
    from cp_ring.tools.job import corpus

    data = job.data
    return corpus.find(
        data.path,
        data.cache,
        vocab_size=data.vocab_size,
        validation_fraction=data.validation_fraction,
    )


def build_command(job: JobConfig, elsewhere: bool = False, tasks: int | None = None) -> Command:
    """The command of `job`, checked by cp_ring's rules and by Megatron's parser and validation.
    With `elsewhere`, other nodes run it; their GPUs are unknown here. tasks: how many ranks Slurm
    starts on all nodes, of which this is one.

    Raises `ConfigError` with all reasons, each with its key.
    """
    reasons = Reasons()
    visible: dict[str, str] = {}
    device = "cuda" if job.launch.device == "cuda" else "cpu"
    with reasons.of(), _keys_of(job):
        device, visible = choose_device(job, elsewhere, tasks)
    corpus, line = checked_flags(job, device, reasons, Reasons() if elsewhere else reasons)
    return Command(_environment(job, device) | visible, _torchrun(job), line, corpus)


def checked_flags(
    job: JobConfig,
    device: str,
    reasons: Reasons,
    missing: Reasons | None,
    otherwise: str = "",
) -> tuple[Corpus | None, list[str]]:
    """The corpus and the flags of `job`.

    missing: gets what is not installed: it is `reasons`, or others, of which this warns, or None.
    otherwise: text for the end of these lines, with another way out.
    Raises `ConfigError` with all reasons, those found before too.
    """
    line: list[str] = []
    corpus = args = None
    with reasons.of(), _keys_of(job):
        corpus = find_corpus(job)
    with reasons.of():
        line, args = megatron_flags(job, corpus, device)
    if args is not None:
        if missing is not None:
            with missing.of(), _keys_of(job):
                check_layers(args, otherwise)
        with reasons.of():
            check_by_megatron(job, args)
    reasons.end()
    for problem in missing.found if missing else ():
        print(f"cp_ring: warning: {problem}", file=sys.stderr)
    return corpus, line


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

    packed = [key for key in PACKED_DATA if job.megatron.get(key)]
    if packed and not job.cp_ring.enabled:
        raise ConfigError(
            f"{job.source}: megatron.{packed[0]} needs cp_ring.enabled, which masks documents"
        )
    config = replace(
        job.cp_ring,
        cpu=device == "cpu",
        run_dir=str(run_dir(job).absolute()),
        document_mask=bool(packed) or job.cp_ring.document_mask,
    )
    parser = parser or argument_parser.build_parser()
    sizes = job.parallel.model_dump(exclude={"data_parallel_size"})
    with _keys_of(job):
        settings = _defaults(job, corpus) | job.megatron
        megatron = argument_parser.to_flags(parser, parallel=sizes, megatron=settings)
        megatron += config.to_args()
        args = argument_parser.check(parser, megatron)
        _run_rank_checks(args, job, config, megatron)
    return megatron, args


def check_layers(args: argparse.Namespace, otherwise: str = "") -> None:
    """Raises `ConfigError` if `args` ask for layers of a package that is not installed."""
    from cp_ring.megatron.flags import rules

    try:
        check_rules(Job(args), rules.LAYERS)
    except ConfigError as error:
        raise ConfigError(*(f"{line}{otherwise}" for line in error.args)) from None


def _run_rank_checks(
    args: argparse.Namespace,
    job: JobConfig,
    config: Options,
    line: list[str],
) -> None:
    """Runs the ranks' own checks of the flags in `line` once, before any rank starts."""
    from cp_ring.megatron.flags import rules, validate
    from cp_ring.megatron.flags.codec_choice import check_latent

    args.world_size = job.parallel.ranks
    flags = Job(args, config, line)
    if "--cp-ring-cpu" in line:
        with contextlib.redirect_stdout(io.StringIO()):  # the ranks print what it sets
            validate.run_on_cpu(flags)
    data = () if uses_corpus(job) else rules.DATA
    reasons = Reasons()
    with reasons.of():
        validate.check_job(flags, rules.COMPLETE + rules.TRAINING + data)
    with reasons.of():
        if config.enabled and flags.cp > 1:
            check_latent(args, config.heads if isinstance(config.heads, int) else 1, config)
    reasons.end()


def check_by_megatron(job: JobConfig, args: argparse.Namespace) -> None:
    """Raises `ConfigError` with the line of Megatron's own validation, where it rejects `args`."""
    from cp_ring.megatron.flags import acceptance

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

    Raises `ConfigError` where launch.device is cuda and the node has fewer GPUs than ranks; not if
    the job runs `elsewhere`.
    """
    import torch

    if tasks is not None:
        if tasks != job.parallel.ranks:
            raise ConfigError(
                f"{tasks} tasks, but the sizes in section parallel make {job.parallel.ranks} "
                "ranks: ask Slurm for as many tasks, or change parallel.data_parallel_size"
            )
        on_cpu = job.launch.device == "cpu"
        on_cpu |= job.launch.device == "auto" and not torch.cuda.is_available()
        return "cpu" if on_cpu else "cuda", {}
    if elsewhere and job.launch.device == "cuda":
        return "cuda", {}

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = job.parallel.ranks // job.launch.nnodes
    if job.launch.device == "cuda" and gpus < ranks:
        raise ConfigError(
            f"launch.device cuda: this node has {gpus} GPUs for {ranks} ranks (the product of the "
            "sizes in section parallel, over launch.nnodes); lower a size or set launch.device=cpu"
        )
    device = "cpu" if job.launch.device == "cpu" or gpus < ranks else "cuda"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu" and ranks * RANK_BYTES > memory:
        raise ConfigError(
            f"{ranks} ranks (the product of the sizes in section parallel, over "
            f"launch.nnodes) on the CPU need {ranks * RANK_BYTES >> 30} GiB, and this machine has "
            f"{memory >> 30}: lower a size"
        )
    if device == "cpu" and gpus and job.launch.device == "auto":
        print(
            f"cp_ring: {gpus} GPUs are too few for {ranks} ranks: running on the CPU",
            file=sys.stderr,
        )
    return device, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" and gpus else {}


def run_dir(job: JobConfig) -> Path:
    """Where the job's checkpoints and logs go."""
    return job.launch.run_dir or Path("runs/job")


def checkpoints(job: JobConfig) -> Path:
    """Where checkpoints are saved: megatron.save if it is given."""
    return Path(job.megatron.get("save") or run_dir(job) / "checkpoints").absolute()


def _defaults(job: JobConfig, corpus: Corpus | None) -> dict[str, Any]:
    """Megatron arguments that follow from the other sections. The section `megatron` may override
    them.
    """
    settings: dict[str, Any] = {
        "save": str(checkpoints(job)),
        "load": str(checkpoints(job)),
        "tensorboard_dir": str((run_dir(job) / "tensorboard").absolute()),
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


def _environment(job: JobConfig, device: str) -> dict[str, str]:
    """Variables of torchrun and its ranks. A variable that is already set keeps its value.

    Each rank gets one thread, because ranks on one machine share its cores. Gloo needs the loopback
    interface by name, because a host name can resolve to an address that no other rank listens on.
    Megatron requires one CUDA connection, and rejects one where parameters are sharded.
    """
    variables = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    if device != "cpu" and not any(
        job.megatron.get(name) for name in ("use_torch_fsdp2", "use_megatron_fsdp")
    ):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # time to save
    variables |= {
        "PET_SHUTDOWN_TIMEOUT": "600",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }
    # else restarted ranks read old addresses from a store that is still alive
    if job.launch.max_restarts:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if device == "cpu" and job.launch.nnodes == 1:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _torchrun(job: JobConfig) -> list[str]:
    launch = job.launch
    options = [
        "--nproc-per-node",
        str(job.parallel.ranks // launch.nnodes),
        "--max-restarts",
        str(launch.max_restarts),
    ]
    if launch.nnodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1", *options]
    options += ["--nnodes", str(launch.nnodes), "--node-rank", str(launch.node_rank)]
    return [
        *options,
        "--master-addr",
        str(launch.master_addr),
        "--master-port",
        str(launch.master_port),
    ]
