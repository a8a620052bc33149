"""The files of a run directory that people and scripts read: steps.jsonl, one line per logged step,
and DONE at the end.

`steps.jsonl` grows over all restarts: a step that was repeated has two lines, and the later line
counts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cp_ring.runtime import RUNTIME

STEPS = "steps.jsonl"
DONE = "DONE"
JOB = "job.yaml"
_OF_SCRIPT = "# the arguments of a script, for `cp-ring status`\n"
_PARALLEL = [
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "data")
]
WAITED = "waited for plans"
"""Entry of a step: seconds that the slowest rank waited for the plans of its microbatches, where
that is above 1 ms.
"""
GRADIENT_NORM, LEARNING_RATE = "gradient norm", "learning rate"
"""Entries of a step, where Megatron's log has them."""

_warned: set[str] = RUNTIME.keep(set())


def append(folder: str, step: int, values: Mapping[str, Any]) -> None:
    """Adds a step. Only one rank calls this. A process that is killed after this returns does not
    lose the line.
    """
    line = json.dumps({"step": step, **values, "time": round(time.time(), 3)})
    path = Path(folder) / STEPS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_end_of_torn_line(path) + line.encode() + b"\n")


@contextlib.contextmanager
def warning_once(name: str) -> Iterator[None]:
    """A log that cannot be written, as on a full disk, does not end the job: the first time, a line
    says why.
    """
    try:
        yield
    except OSError as error:
        if name not in _warned:
            _warned.add(name)
            with contextlib.suppress(OSError):  # standard error may be on the same disk
                print(
                    f"cp_ring: {name} cannot be written; the job goes on: {error}",
                    file=sys.stderr,
                    flush=True,
                )


def _end_of_torn_line(path: Path) -> bytes:
    """A newline if the last line has none because its writer was killed, else nothing."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return b""
        file.seek(-1, 2)
        return b"" if file.read(1) == b"\n" else b"\n"


def read(folder: Path) -> list[dict[str, Any]]:
    """All complete lines, in the order in which they were written; [] if there is no file."""
    path = folder / STEPS
    steps = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            step = json.loads(line)
        except ValueError:  # an incomplete line
            continue
        if isinstance(step, dict) and isinstance(step.get("step"), int):
            steps.append(step)
    return steps


def timings(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the sampled ones of these steps say of their times."""
    return [step["timing"] for step in steps if isinstance(step.get("timing"), dict)]


def begin(folder: Path) -> None:
    """Removes DONE, because the job starts again for more steps."""
    (folder / DONE).unlink(missing_ok=True)


def begin_script(folder: Path, arguments: Mapping[str, Any]) -> None:
    """As `begin`, of a job without a job.yaml: it gets one, with Megatron's arguments."""
    path = folder / JOB
    if path.is_file() and not path.read_text().startswith(_OF_SCRIPT):
        return
    folder.mkdir(parents=True, exist_ok=True)
    plain = {k: v for k, v in arguments.items() if isinstance(v, int | float | str | list | None)}
    for name in ("save", "load"):  # the reader's working folder may be another one
        if plain.get(name):
            plain[name] = str(Path(str(plain[name])).absolute())
    own = {name: plain.pop(name) for name in list(plain) if name.startswith("cp_ring")}
    sections = {
        "parallel": {name: plain.pop(name, 1) for name in _PARALLEL},
        "cp_ring": {
            name.removeprefix("cp_ring_").replace("cp_ring", "enabled"): value
            for name, value in own.items()
            if name not in ("cp_ring_run_dir", "cp_ring_cpu")  # these follow from section launch
        },
        "megatron": plain,
    }
    path.write_text(_OF_SCRIPT + json.dumps(sections, indent=1, default=str) + "\n")
    begin(folder)


def finish(folder: str, step: int) -> None:
    """Writes DONE: the job has finished after `step` steps and need not start again."""
    (Path(folder) / DONE).write_text(f"{step}\n")
