"""`cp-ring status`: the state of a run, from its directory and Slurm's queue."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.job import local_run
from cp_ring.tools.slurm import attempts

_ERROR = re.compile(r"cp_ring: error: .*|^\w*(?:Error|Exception|Exit)\b.*")
_TAIL_BYTES = 200_000


def status(run_dir: Path) -> dict[str, Any]:
    """State, last step, newest whole checkpoint, restarts, last stop. Raises `ConfigError` if
    `run_dir` holds no run.
    """
    megatron = _read_megatron(run_dir)
    steps = progress.read(run_dir)
    events = attempts.read(run_dir)
    last = steps[-1] if steps else {}
    since = _number_or_none(last.get("time"))
    number = events[-1].job if events else None
    save = str(megatron.get("save") or run_dir / "checkpoints")
    return {
        "run": str(run_dir),
        "job": number,
        "state": _describe_state(run_dir, number, bool(steps)),
        "step": last.get("step", 0),
        "train_iters": megatron.get("train_iters"),
        "loss": _number_or_none(last.get("lm loss")),
        "seconds_since_step": None if since is None else round(time.time() - since, 1),
        "checkpoint": _newest_checkpoint(Path(save)),
        "save": save,
        "restarts": max((event.restart for event in events if event.job == number), default=0),
        "last_stop": _last_stop(run_dir, events),
    }


def lines(facts: dict[str, Any]) -> dict[str, str]:
    """What people see of the facts, by name."""
    total = f" of {facts['train_iters']}" if facts["train_iters"] else ""
    return {
        "state": facts["state"],
        "last step": f"{facts['step']}{total}",
        "checkpoint": facts["checkpoint"] or "none yet",
        "restarts": str(facts["restarts"]),
        "last stop": facts["last_stop"] or "none",
    }


def show(facts: dict[str, Any]) -> str:
    """The facts as text, one per line."""
    shown, since = lines(facts), facts["seconds_since_step"]
    shown["last step"] += "" if facts["loss"] is None else f", loss {facts['loss']:.4f}"
    shown["last step"] += "" if since is None else f", {since:.0f} s ago"
    return "\n".join(f"{name + ':':12}{value}" for name, value in shown.items())


def _read_megatron(run_dir: Path) -> dict[str, Any]:
    """The section megatron of the job.yaml that `cp-ring train` or `submit` wrote."""
    path = run_dir / "job.yaml"
    if not os.path.isfile(path):
        raise ConfigError(
            f"{run_dir}: it has no job.yaml, so it is not the launch.run_dir of a job, nor the "
            "--cp-ring-run-dir of a script that has done a step"
        )
    megatron = configs.read(path, str(path)).get("megatron")
    if not isinstance(megatron, dict):
        raise ConfigError(f"{path}: it has no section megatron, so it is not the job.yaml of a run")
    return megatron


def _number_or_none(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _describe_state(run_dir: Path, number: str | None, begun: bool) -> str:
    queued = attempts.queue_state(number) if number else None
    if queued is not None:
        return f"{queued.name}, job {number} ({queued.detail})"
    if (run_dir / progress.DONE).is_file():
        return "DONE"
    local = local_run.state(run_dir)
    if number and (local is None or local.startswith("stopped")):
        return f"job {number} is not in the queue"
    return local or ("started by a script" if begun else "not started")


def _newest_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint, and what is wrong with newer ones."""
    from cp_ring.megatron.checkpoints import folders, inspection

    iterations = list(reversed(folders.published(folder)))
    bad = ""
    for iteration in iterations:
        path = folders.folder_of(folder, iteration)
        problem = inspection.defect(path)
        if not problem:
            return f"iteration {iteration}{bad}"
        bad = bad or f" ({path.name} is not whole: {problem})"
    return None if not iterations else f"none is whole{bad}"


def _last_stop(run_dir: Path, events: list[attempts.Event]) -> str:
    """Why the last finished attempt ended: the reason from the batch script, and the first error
    that a rank printed.
    """
    starts = [event for event in events if event.kind == "start"]
    stops = [event for event in events if event.kind == "stop"]
    if not starts:
        return ""
    last = stops[-1] if stops else None
    lost = [
        start
        for start in starts[:-1]
        if not any((s.job, s.restart) == (start.job, start.restart) for s in stops)
    ]
    if lost and (last is None or lost[-1].time > last.time):
        what = f"try {lost[-1].restart} from iteration {lost[-1].iteration}"
        return f"{what} ended without a record: its first node was lost, or it was killed"
    if last is None:
        return ""
    error = (
        ""
        if last.reason in ("done", "terminated by Slurm", "warned")
        else _first_error(run_dir / "logs" / f"{last.job}.{last.restart}")
    )
    return f"{last.reason}, at iteration {last.iteration} of try {last.restart}{error}"


def _first_error(logs: Path) -> str:
    """The last error line of the rank whose log ended first, among ranks with such a line."""
    errors = []
    for path in logs.glob("rank*.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [
                line
                for line in file.read().decode(errors="replace").splitlines()
                if _ERROR.search(line)
            ]
        if lines:
            errors.append((path.stat().st_mtime_ns, path.stem, lines[-1].strip()))
    return f"; {min(errors)[1]}: {min(errors)[2][:300]}" if errors else ""
