"""The history of a run under Slurm (`attempts.tsv`, which the batch script writes) and its state in
the queue.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cp_ring.tools.job.doctor import output_of

FILE = "attempts.tsv"


@dataclass(frozen=True)
class Event:
    """A line of the history: `kind` is submit, start or stop; `restart` is the number of the
    attempt of the job.
    """

    time: int
    job: str
    restart: int
    kind: str
    iteration: int
    reason: str


@dataclass(frozen=True)
class QueueState:
    """The state of a job from squeue: `name` is PENDING, RUNNING or another; `detail` is why it
    waits or where it runs.
    """

    name: str
    detail: str


def append(run_dir: Path, job: str, kind: str) -> None:
    with (run_dir / FILE).open("a") as file:
        file.write(f"{int(time.time())}\t{job}\t0\t{kind}\t0\t\n")


def read(run_dir: Path) -> list[Event]:
    """The history, oldest first; incomplete lines are left out."""
    path = run_dir / FILE
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        words = line.split("\t")
        if len(words) == 6 and all(words[i].isdigit() for i in (0, 2, 4)):
            events.append(
                Event(int(words[0]), words[1], int(words[2]), words[3], int(words[4]), words[5])
            )
    return events


def last_job(run_dir: Path) -> str | None:
    """The id of the newest job of the run, or None."""
    events = read(run_dir)
    return events[-1].job if events else None


def queue_state(job: str) -> QueueState | None:
    """The state of a job that is queued, running or being requeued; None for other jobs, and where
    there is no Slurm.
    """
    text = output_of("squeue", "--noheader", f"--jobs={job}", "--format=%T|%R")
    name, _, detail = text.partition("|")
    return QueueState(name, detail.strip("()")) if name else None
