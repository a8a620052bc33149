"""`cp-ring train`: prepares the corpus, runs the ranks with torchrun, and shows the lines that a
person needs. A log file gets all output.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TextIO

from cp_ring.errors import ConfigError
from cp_ring.tools import job as jobs

if TYPE_CHECKING:
    from cp_ring.tools.corpus import Corpus

_IMPORTANT = re.compile(
    r"cp_ring: |(WARNING|ERROR|CRITICAL):cp_ring\b|\s*validation loss at |"
    r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b"
)
_STEP = re.compile(r"\biteration +(\d+/) *(\d+) \|")
_VALUES = re.compile(r"([\w ]+ loss|grad norm|\(ms\)): *([\d.E+-]+|nan|inf) ")


def train(
    source: str,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    print_flags: bool = False,
) -> int:
    """Runs or resumes the job of a YAML file or packaged name. Returns the exit code: 0, that of
    the first rank that failed (2 where the ranks reject the job), and 128 more than the signal that
    ended the job: 130 for Ctrl-C, 143 for SIGTERM.

    dry_run: checks the job and prints its command line. print_flags: prepares it too. All checks
    come before a rank starts. Raises `ConfigError`.
    """
    with contextlib.ExitStack() as until_end:
        with contextlib.redirect_stdout(sys.stderr):
            job = jobs.load(source, overrides)
            command = jobs.build_command(job, here=not (dry_run or print_flags))
            runs = None if print_flags else until_end
            log = Path() if dry_run else _prepare(job, command.corpus, runs)
        if dry_run or print_flags:
            print(command.as_shell_lines(), flush=True)
            return 0
        if before := _last_step(job):
            say(f"resuming from step {before}")
        say(
            f"the output of all ranks goes to {log}; Ctrl-C saves and ends, a second one ends "
            "without saving"
        )
        code = run(command, log)
    if saved := _last_step(job):
        say(
            f"step {saved}: checkpoints and tensorboard are in "
            f"{Path(job.launch.run_dir).absolute()}; the same command goes on from there"
        )
    return code


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run directory, whose checkpoints both would write. Raises
    `ConfigError` if there is one.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"launch.run_dir {folder}: another job is running there: end it, or give another "
                "launch.run_dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def _prepare(
    job: jobs.JobConfig, corpus: Corpus | None, runs: contextlib.ExitStack | None = None
) -> Path:
    """Make the run directory and build the corpus, unless they exist. Return the log file of a new
    start. If the job `runs`, it keeps others out of the directory while that context lasts.

    Raises `ConfigError` if another job is running there, or if the run has checkpoints that were
    trained on another corpus.
    """
    folder = Path(job.launch.run_dir)
    log = folder / "logs" / f"train-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if runs:
            runs.enter_context(_alone(folder))
        if corpus is None:
            return log
        from cp_ring.tools import corpus as corpora

        corpora.build(corpus)
        digest = corpus.summary()["digest"]
        record = folder / "corpus"  # the digest of the corpus that the run was trained on
        earlier = record.read_text() if record.is_file() else ""
        if _last_step(job) and earlier not in ("", digest):
            raise ConfigError(
                f"data.path: the run in {folder} was trained on another corpus than "
                f"{corpus.folder}: give another launch.run_dir, or delete {record} to go on with "
                "the new corpus"
            )
        record.write_text(digest)
    except OSError as error:
        raise ConfigError(f"launch.run_dir {folder}: {error.strerror}") from None
    say(f"corpus {corpus.folder}")
    return log


def _last_step(job: jobs.JobConfig) -> int:
    """Return the step of the newest finished checkpoint, from Megatron's own tracker file; 0 if
    there is none.
    """
    try:
        return int((job.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


class Console(io.TextIOBase):
    """A stream to which torchrun writes lines of all ranks, each with its rank in front. `log` gets
    them; `shown` a line per step, validation losses, exceptions and what starts with `cp_ring:`,
    once where several ranks print it.
    """

    def __init__(self, log: Path, shown: TextIO):
        self.log, self.shown = log, shown
        self.told: set[str] = set()
        self.lock = Lock()  # each rank's lines come from a thread of its own

    def write(self, text: str) -> int:
        header, _, line = text.strip().partition("] ")
        if line:
            # a full disk must not end the job
            with contextlib.suppress(OSError), self.log.open("a") as log:
                log.write(f"{header}] {line}\n")
        with self.lock:
            if (words := for_people(line)) and words not in self.told:
                say(words, "", self.shown)
                self.told.add(words)
        return len(text)


def run(command: jobs.Command, log: Path) -> int:
    """Runs all ranks until they end; their output goes to the log. Returns the exit code of
    `train`. Signals are torchrun's: it passes them on to the ranks, which save.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ |= command.environment
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    with (
        tempfile.TemporaryDirectory(prefix="cp_ring-") as folder,
        contextlib.redirect_stdout(Console(log, sys.stdout)),
        contextlib.redirect_stderr(Console(log, sys.stderr)) as errors,
    ):
        launcher = logging.getLogger("torch.distributed")
        launcher.handlers, launcher.propagate = [logging.FileHandler(log)], False
        try:
            torchrun.run(torchrun.parse_args(command.torchrun("--tee", "3", "--log-dir", folder)))
            return 0
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
    code = failure.exitcode
    if code != 2 or not errors.told:  # otherwise the ranks have rejected the job and printed why
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        line = f"rank {rank} ended with {ending}; the output of all ranks is in {log}"
        say(line, "cp_ring: error: ", sys.stderr)
    return code if code > 0 else 128 - code


def for_people(line: str) -> str | None:
    """Return a line of a rank as a person needs it, None for a line that nobody needs."""
    step = _STEP.search(line)
    if step is None:
        return line.strip(" |") if _IMPORTANT.match(line) else None
    values = (f"{name.strip(' ()')} {float(value):.5g}" for name, value in _VALUES.findall(line))
    return " | ".join([f"step {step[1]}{step[2]}", *values])


def say(line: str, prefix: str = "cp_ring: ", file: TextIO | None = None) -> None:
    """Print a line at once; a console that nobody reads any more does not end the job."""
    with contextlib.suppress(OSError):
        print(prefix + line, file=file, flush=True)
