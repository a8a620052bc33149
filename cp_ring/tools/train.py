"""`cp-ring train`: prepares the corpus, runs the ranks with torchrun, and shows of their output
what a person needs. A log file gets all of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cp_ring.errors import ConfigError
from cp_ring.tools import job as jobs

if TYPE_CHECKING:
    from cp_ring.tools.corpus import Corpus

ERROR = "cp_ring: error: "
KILLED, TERMINATED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
POLL_S = 0.1
_IMPORTANT = re.compile(r"cp_ring: |(?:WARNING|ERROR|CRITICAL):cp_ring\b")
_VALIDATION = re.compile(r"\s*(validation loss at iteration .*?)[ |]*$")
_STEP = re.compile(r".*\biteration +(\d+)/ *(\d+) \|(.*)")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)")
# torchrun's own words about the rank that failed first
_FIRST = re.compile(rb"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)
_END_BYTES = 1 << 20  # of a log, where torchrun's last words are
_CORPUS = "corpus"  # in the run directory: the digest of the corpus that the run was trained on


def train(
    source: str,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Runs or resumes the job of a YAML file or packaged name. Returns the exit code: 0, that of
    the first rank that failed (2 where the ranks reject the job), 143 after SIGTERM or Ctrl-C, and
    137 after a second Ctrl-C.

    All checks come before a rank starts. Raises `ConfigError`.
    """
    job = jobs.load(source, overrides)
    command = jobs.build_command(job, elsewhere=dry_run)
    if dry_run:
        print(command.as_shell_lines())
        if command.corpus is not None and not command.corpus.ready:
            print(
                "cp_ring: its corpus is not built yet; `cp-ring train` without --dry-run builds it",
                file=sys.stderr,
            )
        return 0
    _prepare(job, command.corpus)
    before, steps = _last_step(job), job.megatron.get("train_iters")
    if before:
        say(f"resuming from step {before}" + (f" of {steps}" if steps else ""))
    log = new_log(job.launch.run_dir)
    say(f"the output of all ranks goes to {log}")
    tokens = (job.megatron.get("global_batch_size") or 0) * (job.megatron.get("seq_length") or 0)
    code = Launch(log, tokens).run(command)
    if code in (0, TERMINATED) and _last_step(job):
        say(
            f"step {_last_step(job)}: checkpoints and tensorboard are in "
            f"{job.launch.run_dir.absolute()}; the same command goes on from there"
        )
    return code


def line_by_hand(source: str, overrides: Sequence[str], ranks: int | None) -> str:
    """Prepares the job as `train` does and starts nothing. Returns its command line for a shell;
    with `ranks` that of one of so many ranks, which Slurm starts.
    """
    slurm = ranks is not None
    job = jobs.load(source, [*overrides, *([f"launch.ranks={ranks}"] if slurm else [])])
    command = jobs.build_command(job, slurm=slurm)
    _prepare(job, command.corpus)
    return command.as_shell_lines(of_one_rank=slurm)


def _prepare(job: jobs.JobConfig, corpus: Corpus | None) -> None:
    """Makes the run directory and builds the corpus, unless they exist.

    Raises `ConfigError` if the run has checkpoints that were trained on another corpus.
    """
    folder = job.launch.run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if corpus is None:
            return
        from cp_ring.tools import corpus as corpora

        corpora.build(corpus)
        facts = corpus.summary()
        record = folder / _CORPUS
        earlier = record.read_text() if record.is_file() else ""
        if _last_step(job) and earlier not in ("", facts["digest"]):
            raise ConfigError(
                f"data.path: the run in {folder} was trained on another corpus than "
                f"{corpus.folder}: give another launch.run_dir, or delete {record} to go on with "
                "the new corpus"
            )
        record.write_text(facts["digest"])
    except OSError as error:
        raise ConfigError(f"launch.run_dir {folder}: {error.strerror}") from None
    say(
        f"corpus {corpus.folder}: {facts['documents']:,} documents, "
        f"{sum(facts['tokens'].values()):,} tokens, vocabulary {facts['vocab_size']:,}"
    )


def _last_step(job: jobs.JobConfig) -> int:
    """The step of the newest finished checkpoint, from Megatron's own tracker file; 0 if there is
    none.
    """
    try:
        return int((job.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def new_log(run_dir: Path) -> Path:
    """A new log file in the run directory. Raises `ConfigError` where it cannot be made."""
    log = run_dir / "logs" / f"train-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        return log
    except OSError as error:
        raise ConfigError(f"launch.run_dir {run_dir}: {error.strerror}") from None


class Launch:
    """Runs torchrun, and follows the files that it writes for each rank.

    Each line goes to `log` with its rank in front. The console gets the lines that start with
    `cp_ring:`, validation losses and a line per step. Errors come last.

    tokens: of a step, for the tokens per second; 0 if they are not known.
    """

    def __init__(self, log: Path, tokens: int = 0):
        self.log, self.tokens = log, tokens
        self.errors: dict[str, None] = {}
        self.exceptions: dict[int, str] = {}
        self._read: dict[Path, int] = {}
        self._interrupts = 0
        self._asked_to_end = self._full = False

    def run(self, command: jobs.Command) -> int:
        """Runs all ranks until they end. Returns the exit code of `train`."""
        with (
            tempfile.TemporaryDirectory(prefix="cp_ring-") as folder,
            self.log.open("ab", buffering=0) as log,
            self._signals(),
            subprocess.Popen(
                command.words("--redirects", "3", "--log-dir", folder),
                env=os.environ | command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone
            ) as torchrun,
        ):
            said = told = 0
            while True:
                # asked before reading, so that the last round reads all that the ranks wrote
                ended = torchrun.poll() is not None
                for path in sorted(Path(folder).glob("*/attempt_*/*/std*.log")):
                    for line in self._new_lines(path, ended):
                        self._pass_on(line, path, log)
                if ended:
                    break
                if self._interrupts > said:
                    said = self._interrupts
                    say(
                        "Ctrl-C: the job saves and then ends; Ctrl-C again ends it at once, "
                        "without saving"
                        if said == 1
                        else "Ctrl-C again: the ranks are killed"
                    )
                if self._interrupts > 1:
                    kill_children(torchrun.pid)
                elif self._asked_to_end and not told:
                    told = 1
                    torchrun.terminate()
                time.sleep(POLL_S)
        code, line = self._ending(torchrun.returncode)
        for text in [*self.errors, *filter(None, [line])]:
            print(text, file=sys.stderr, flush=True)
        return code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C let the ranks save and end, a second Ctrl-C kills them."""

        def ask(number: int, frame: object) -> None:
            self._asked_to_end = True
            self._interrupts += number == signal.SIGINT

        earlier = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _new_lines(self, path: Path, last: bool) -> list[str]:
        """The lines that a file got since the previous call. An incomplete line counts only in the
        `last` call.
        """
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            added = file.read()
        if not last:
            added = added[: added.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(added)
        return [line for line in added.decode(errors="replace").splitlines() if line.strip()]

    def _pass_on(self, line: str, path: Path, log: BinaryIO) -> None:
        """A line of a rank to the log and, where a person needs it, to the console."""
        rank = int(path.parent.name)
        try:
            log.write(f"[rank {rank}] {line}\n".encode(errors="replace"))
        except OSError as error:  # a full disk must not end the job
            if not self._full:
                self._full = True
                say(f"{self.log} cannot be written; the job goes on: {error.strerror}")
        if exception := _EXCEPTION.fullmatch(line):
            self.exceptions[rank] = exception[1]
        if line.startswith(ERROR):
            self.errors[line] = None
        elif shown := for_people(line, self.tokens):
            say(shown, "", sys.stdout if path.name == "stdout.log" else sys.stderr)

    def _ending(self, torchrun: int) -> tuple[int, str]:
        """The exit code, and a line about the first rank that failed if no rank has said why."""
        if self._asked_to_end:
            return (KILLED if self._interrupts > 1 else TERMINATED), ""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _END_BYTES))
            first = _FIRST.search(log.read())
        if torchrun == 0 or first is None:
            lost = f"{ERROR}torchrun ended with exit code {torchrun}; its output is in {self.log}"
            return torchrun, lost if torchrun else ""
        rank, code = int(first[1]), int(first[2])
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = self.exceptions.get(rank, "")
        line = (
            f"{ERROR}rank {rank} ended with {ending}{reason and f' ({reason[:200]})'}; the output "
            f"of all ranks is in {self.log}"
        )
        # otherwise the ranks have rejected the job and printed why
        return (code if code > 0 else 128 - code), "" if code == 2 and self.errors else line


def kill_children(pid: int) -> None:
    """Kills a process and all below it."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def for_people(line: str, tokens: int = 0) -> str | None:
    """A line of a rank as a person needs it, None for all others. tokens: of a step."""
    if _IMPORTANT.match(line):
        return line
    if validation := _VALIDATION.match(line):
        return validation[1]
    step = _STEP.match(line)
    if step is None:
        return None
    parts = (part.partition(":") for part in step[3].split("|"))
    values = {name.strip(): text for name, _, text in parts}
    shown = [f"step {step[1]}/{step[2]}"]
    for name, text in values.items():
        with contextlib.suppress(ValueError):
            if name.endswith(" loss") or name == "grad norm":
                shown.append(f"{name} {float(text):.4f}")
            elif name.endswith("per iteration (ms)"):
                ms = float(text)
                shown.append(f"{tokens * 1e3 / ms:,.0f} tokens/s" if tokens else f"{ms:,.0f} ms")
    return " | ".join(shown)


def say(line: str, prefix: str = "cp_ring: ", file: object = None) -> None:
    """Prints a line at once; a console that nobody reads any more does not end the job."""
    with contextlib.suppress(OSError):
        print(prefix + line, file=file or sys.stdout, flush=True)  # type: ignore[arg-type]
