"""The output of a job's ranks. A log file gets all of it; the console gets only the lines that a
person needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.observe.standard_streams import ERROR, for_people

POLL_S = 0.1
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)")


def log_path(run_dir: Path, command: str, node: str = "") -> Path:
    """A new log file of `command` in the run directory, which this makes. Raises `ConfigError`
    where it cannot be made.
    """
    folder, number = run_dir / "logs", 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            again = f"-{number}" * (number > 0)
            log = folder / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}{again}{node}.log"
            with contextlib.suppress(FileExistsError), log.open("x"):
                return log
            number += 1  # another start of the same second has that one
    except OSError as error:
        raise ConfigError(f"launch.run_dir {run_dir}: {error.strerror}") from None


class _Log:
    """A log file, open for appending. A line that cannot be written is lost; `tell` gets a line
    about the first one.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]):
        self._path, self._tell, self._told = path, tell, False

    def __enter__(self) -> _Log:
        try:
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, line: str) -> None:
        """Adds a line, without its end."""
        try:
            self._file.write(f"{line}\n".encode(errors="replace"))
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"{self._path} cannot be written; the job goes on: {error.strerror}")


class RankOutput:
    """Follows the files that torch's launcher writes for each rank, and the run's steps.jsonl,
    while the ranks run.

    `folder` is the value of torchrun's --log-dir. Each line goes to `log` with its rank in front.
    The console gets the lines that start with `cp_ring:`, validation losses and a line per step; on
    a terminal a progress bar stays below them. With `verbose` the console gets every line. The
    caller prints `errors` at the end, so that they are the last lines.

    A log that cannot be written, as on a full disk, gives one warning; what is written there until
    it can be is lost.
    """

    def __init__(
        self,
        log: Path,
        *,
        run_dir: Path,
        first_rank: int = 0,
        steps: int | None = None,
        verbose: bool = False,
    ):
        self.log, self.folder = log, log.with_name(f".{log.stem}")
        self.verbose = verbose
        self.errors: dict[str, None] = {}
        self.exceptions: dict[int, str] = {}
        self._run_dir, self._first_rank, self._steps = run_dir, first_rank, steps
        self._read: dict[Path, int] = {}
        self._attempts: set[str] = set()
        self._announced: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()

    def announce(self, line: str) -> None:
        """Lets the thread that follows the ranks print `cp_ring: <line>`. A signal handler must not
        print by itself.
        """
        self._announced.put(f"cp_ring: {line}")

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follows the ranks that run in this block. Other output of this process goes to the log,
        unless `verbose`.
        """
        try:
            self.folder.mkdir()
        except OSError as error:
            raise ConfigError(f"launch.run_dir {self._run_dir}: {error.strerror}") from None
        steps = self._run_dir / progress.STEPS
        # skip the lines of earlier runs
        self._read[steps] = steps.stat().st_size if steps.is_file() else 0
        with (
            _Log(self.log, self.announce) as log,
            self._console(log) as (out, err),
            self._bar(out) as bar,
        ):
            # only the bar's own console can print above it
            err = out if bar is not None and err.is_terminal else err
            thread = threading.Thread(target=self._follow, args=(log, out, err, bar), daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._ended.set()
                thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _console(self, log: _Log) -> Iterator[tuple[Console, Console]]:
        """Two consoles on this process's stdout and stderr. While this lasts, stdout and stderr
        themselves write to the log.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        try:
            with os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err:
                if not self.verbose:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                yield _console_on(out), _console_on(err)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # the log may be on a full disk
                    stream.flush()
            for number, copy in enumerate(kept, start=1):
                os.dup2(copy, number)
                os.close(copy)

    @contextlib.contextmanager
    def _bar(self, console: Console) -> Iterator[Progress | None]:
        """A progress bar, if the console is a terminal and the number of steps is known."""
        if not console.is_terminal or self._steps is None:
            yield None
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(
            *columns, TextColumn("left:"), TimeRemainingColumn(), console=console, transient=True
        ) as bar:
            yield bar

    def _follow(self, log: _Log, out: Console, err: Console, bar: Progress | None) -> None:
        task = None
        while True:
            # asked before reading, so that the last round reads all that the ranks wrote
            last = self._ended.is_set()
            for path in sorted(self.folder.glob("*/attempt_*/*/std*.log")):
                if self._is_new_attempt(path):
                    self._print(out, "cp_ring: the ranks are started again")
                for line in self._new_lines(path, last):
                    self._log_and_print(line, path, log, out if path.name == "stdout.log" else err)
            for line in self._new_lines(self._run_dir / progress.STEPS, last):
                # an incomplete line: its writer was killed
                with contextlib.suppress(ValueError, KeyError):
                    step, shown = _step_line(line, self._steps)
                    self._print(out, shown)
                    log.write(shown)
                    if bar is not None:
                        task = (
                            bar.add_task("", total=self._steps, completed=step)
                            if task is None
                            else task
                        )
                        bar.update(task, completed=step)
            while not self._announced.empty():
                line = self._announced.get()
                self._print(err, line)
                log.write(line)
            if last:
                return
            self._ended.wait(POLL_S)

    def _is_new_attempt(self, path: Path) -> bool:
        """Whether this is the first file of a restart that torch's launcher made."""
        attempt = path.parent.parent.name
        new = attempt not in self._attempts and bool(self._attempts)
        self._attempts.add(attempt)
        return new

    def _new_lines(self, path: Path, last: bool) -> list[str]:
        """The lines that a file got since the previous call. An incomplete line counts only in the
        `last` call.
        """
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                added = file.read()
        except OSError:  # the launcher has not made it yet, or somebody has removed it
            return []
        if not last:
            added = added[: added.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(added)
        return [
            line.rstrip("\r") for line in added.decode(errors="replace").split("\n") if line.strip()
        ]

    def _log_and_print(self, line: str, path: Path, log: _Log, console: Console) -> None:
        rank = self._first_rank + int(path.parent.name)
        log.write(f"[rank {rank}] {line}")
        exception = _EXCEPTION.fullmatch(line)
        if exception:
            self.exceptions[rank] = exception[1]
        if line.startswith(ERROR):
            self.errors[line] = None
        elif shown := line if self.verbose else for_people(line):
            self._print(console, shown)

    def _print(self, console: Console, line: str) -> None:
        # nobody reads the console any more; the log still gets all lines
        with contextlib.suppress(OSError):
            console.print(line)


def _console_on(file: TextIO) -> Console:
    return Console(file=file, highlight=False, markup=False, soft_wrap=True, emoji=False)


def _step_line(line: str, steps: int | None) -> tuple[int, str]:
    """The step number and the text for the console, from a line of steps.jsonl."""
    values = json.loads(line)
    step = values.pop("step")
    rate = values.pop("tokens per second")
    memory = values.pop("memory")
    waited = values.pop(progress.WAITED, 0)
    del values["time"]
    # the rank that writes them has printed them
    for name in ("timing", progress.GRADIENT_NORM, progress.LEARNING_RATE):
        values.pop(name, None)
    losses = " | ".join(f"{name} {value:.4f}" for name, value in values.items())
    total = "" if steps is None else f"/{steps}"
    tail = f" | waited {waited * 1e3:.1f} ms for plans" if waited else ""
    return (
        step,
        f"step {step}{total} | {losses} | {rate:,.0f} tokens/s | {memory / 2**30:.2f} GiB per "
        f"rank{tail}",
    )
