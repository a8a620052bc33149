"""`cp-ring train`: prepares the corpus, starts the ranks with torch's elastic launcher, and prints
where the results are.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.job import command_line as commands
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.job.launch import launch
from cp_ring.tools.job.output import RankOutput, log_path

if TYPE_CHECKING:
    from cp_ring.tools.job.corpus import Corpus

CORPUS = "corpus.json"  # in the run directory: which corpus the run was trained on


def train(
    source: str,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    verbose: bool = False,
    again: str | None = None,
) -> int:
    """Runs or resumes the job of a YAML file or packaged name. Returns the exit code.

    verbose: print all output of the ranks, which is otherwise only in a log file.
    again: the command of a shell that runs this job; by default cp-ring itself.
    All checks come before a rank starts. Raises `ConfigError`.
    """
    job = configs.load(source, overrides)
    command = commands.build_command(job, elsewhere=dry_run)
    corpus = command.corpus
    if dry_run:
        print(command.as_shell_line())
        if corpus is not None and not corpus.ready:
            print(
                "cp_ring: its corpus is not built yet; `cp-ring train` without --dry-run builds it",
                file=sys.stderr,
            )
        return 0
    if corpus is not None:
        prepare_corpus(corpus, job)
    record_job(job, corpus)
    before = last_step(job)
    steps = job.megatron.get("train_iters")
    if before and steps and before >= steps:
        say(
            f"all {steps} steps are done: only validating; for more, --set "
            f"megatron.train_iters={2 * steps}"
        )
    elif before:
        say(f"resuming from step {before}" + (f" of {steps}" if steps else ""))
    code = launch(command, open_output(job, "train", verbose))
    if code in (0, 128 + signal.SIGTERM):
        say(_closing_line(job, again or _command(source), overrides))
    return code


def line_by_hand(source: str, overrides: Sequence[str], tasks: int | None) -> str:
    """Prepares the job as `train` does and starts nothing. Returns its command line for a shell;
    with `tasks` that of one of so many ranks, which Slurm starts.
    """
    job = configs.load(source, overrides)
    command = commands.build_command(job, tasks=tasks)
    if command.corpus is not None:
        prepare_corpus(command.corpus, job)
    record_job(job, command.corpus)
    return command.as_shell_line() if tasks is None else command.of_one_rank()


def open_output(job: configs.JobConfig, name: str, verbose: bool) -> RankOutput:
    """Opens a new log file in the run directory for the output of this node's ranks, and prints its
    path.
    """
    launch = job.launch
    several = launch.nnodes > 1
    log = log_path(commands.run_dir(job), name, f"-node{launch.node_rank}" if several else "")
    say(f"the output of all ranks goes to {log}" + ("" if verbose else " (--verbose shows it)"))
    return RankOutput(
        log,
        run_dir=commands.run_dir(job),
        first_rank=launch.node_rank * job.parallel.ranks // launch.nnodes,
        steps=job.megatron.get("train_iters"),
        verbose=verbose,
    )


def last_step(job: configs.JobConfig) -> int:
    """The step of the newest finished checkpoint, from Megatron's own tracker file; 0 if there is
    none.
    """
    tracker = commands.checkpoints(job) / "latest_checkpointed_iteration.txt"
    try:
        return int(tracker.read_text())
    except (OSError, ValueError):
        return 0


def prepare_corpus(corpus: Corpus, job: configs.JobConfig) -> None:
    """Builds the corpus unless it exists, and prints its size.

    Raises `ConfigError` if the run has checkpoints that were trained on another corpus, unless
    data.replace is true.
    """
    from cp_ring.tools.job import corpus as corpora

    corpora.build(corpus)
    _reject_another_corpus(corpus, job)
    summary = corpus.summary()
    documents = summary["documents"]
    tokens = sum(summary["tokens"].values())
    say(
        f"corpus {corpus.folder}: {documents:,} documents, {tokens:,} tokens, vocabulary "
        f"{summary['vocab_size']:,}"
    )


def _reject_another_corpus(corpus: Corpus, job: configs.JobConfig) -> None:
    path = commands.run_dir(job) / CORPUS
    step = last_step(job)
    try:
        earlier = json.loads(path.read_text())
        folder, digest = earlier["folder"], earlier["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if step and digest != corpus.summary().get("digest") and not job.data.replace:
        raise ConfigError(
            f"data.path: the run in {commands.run_dir(job)} was trained on the corpus {folder} up "
            f"to step {step}, but this is another corpus, {corpus.folder}: give another "
            "launch.run_dir, or --set data.replace=true to go on with the new corpus"
        )


def record_job(job: configs.JobConfig, corpus: Corpus | None) -> None:
    """Writes job.yaml (the job as it is run, overrides included) and corpus.json into the run
    directory, and removes DONE.
    """
    folder = commands.run_dir(job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        progress.begin(folder)
        settings = job.model_dump(mode="json")
        for name in ("save", "load"):  # the reader's working folder may be another one
            if job.megatron.get(name):
                settings["megatron"][name] = str(Path(job.megatron[name]).absolute())
        (folder / "job.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        if corpus is not None:
            (folder / CORPUS).write_text(
                json.dumps({"folder": str(corpus.folder), **corpus.summary()}, indent=2) + "\n"
            )
    except OSError as error:
        raise ConfigError(f"launch.run_dir {folder}: {error.strerror}") from None


def _command(source: str) -> str:
    """What starts the job of `source` in this folder, also where cp-ring is not on PATH."""
    program = ["cp-ring"] if shutil.which("cp-ring") else [sys.executable, "-m", "cp_ring.tools"]
    return shlex.join([*program, "train", source])


def _closing_line(job: configs.JobConfig, again: str, overrides: Sequence[str]) -> str:
    step = last_step(job)
    steps = job.megatron.get("train_iters")
    # applies to one start only
    settings = [setting for setting in overrides if not setting.startswith("data.replace=")]
    if steps and step >= steps:  # the same command would only validate, so add steps
        settings = [
            setting for setting in settings if not setting.startswith("megatron.train_iters=")
        ]
        settings.append(f"megatron.train_iters={2 * steps}")
    words = [again, *(f"--set {shlex.quote(setting)}" for setting in settings)]
    return (
        f"step {step}: checkpoints, tensorboard and job.yaml are in "
        f"{commands.run_dir(job).absolute()}; to go on: {' '.join(words)}"
    )


def say(line: str) -> None:
    Console(highlight=False, soft_wrap=True, markup=False).print(f"cp_ring: {line}")
