"""`cp-ring compare`: the same job with cp_ring and without it, for some steps each, side by side.

Without cp_ring means stock context parallelism of the same size where the layers are
TransformerEngine's and there are GPUs. Where that cannot run the job, it means stock attention at
context parallel size 1, or cp_ring itself at size 1.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.options import Options
from cp_ring.tools.job import command_line as commands
from cp_ring.tools.job import job_config as configs

RING, BASELINE = "cp_ring", "baseline"
_SAMPLES = 3
"""Steps of the job with cp_ring whose exposed communication is measured, at least, where it has so
many.
"""

_TRACED = ("step", "lm loss", progress.GRADIENT_NORM, progress.LEARNING_RATE)


class Compared(NamedTuple):
    """One of both jobs, its name for people, and, of the baseline, why nothing closer to the job
    can run.
    """

    job: configs.JobConfig
    name: str
    reasons: tuple[str, ...]


def compare(
    source: str,
    overrides: Sequence[str],
    steps: int,
    out: Path | None,
    run: Callable[[Path], int],
) -> dict[str, Any]:
    """Runs both jobs and compares their steps.

    Args:
        source, overrides: the job, as for `cp-ring train`.
        steps: training steps of each job.
        out: an empty folder for both; None for the job's run directory with `-compare` behind its
        name.
        run: trains the job of a file, and returns the exit code.

    Raises `ConfigError` where the job has no context parallelism, the folder is not empty, or one
    of the jobs fails.
    """
    job = configs.load(source, overrides)
    cp = job.parallel.context_parallel_size
    if not job.cp_ring.enabled:
        raise ConfigError(f"{source}: compare needs cp_ring.enabled: true")
    if cp == 1:
        raise ConfigError(f"{source}: compare needs parallel.context_parallel_size above 1, not 1")
    if steps < 2:
        raise ConfigError(
            f"--steps {steps}: it must be at least 2, because the first step is not timed"
        )
    folder = out or commands.run_dir(job).with_name(commands.run_dir(job).name + "-compare")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder}: it is not empty; name a new folder, or remove it")
    timed = replace(job.cp_ring, timing=max(1, steps // _SAMPLES))
    ring = _short(job.model_copy(update={"cp_ring": timed}), steps, folder / RING)
    # what is wrong with the job is said before anything runs
    commands.build_command(ring)
    baseline = _baseline(job, steps, folder / BASELINE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}") from None
    name = f"cp_ring, context parallel size {cp}"
    both = {RING: Compared(ring, name, ()), BASELINE: baseline}
    facts = {side: _run(compared, folder, side, run) for side, compared in both.items()}
    largest = difference(facts[RING]["trace"], facts[BASELINE]["trace"])
    about = {"job": source, "folder": str(folder), "steps": steps}
    return {**about, **facts, "difference": largest}


def _run(compared: Compared, folder: Path, side: str, run: Callable[[Path], int]) -> dict[str, Any]:
    path = folder / f"{side}.yaml"
    path.write_text(yaml.safe_dump(compared.job.model_dump(mode="json"), sort_keys=False))
    if code := run(path):
        raise ConfigError(
            f"compare: the job {path} ended with exit code {code}; its output is in "
            f"{folder / side / 'logs'}"
        )
    return {
        "name": compared.name,
        "because": list(compared.reasons),
        "ranks": compared.job.parallel.ranks,
        **summary(folder / side),
    }


def _short(job: configs.JobConfig, steps: int, folder: Path) -> configs.JobConfig:
    """The job for some steps, each of them logged, without checkpoints and evaluation."""
    changes = {
        "train_iters": steps,
        "log_interval": 1,
        "eval_iters": 0,
        "save": None,
        "load": None,
        "save_interval": None,
    }
    return job.model_copy(
        update={
            "megatron": {**job.megatron, **changes},
            "launch": job.launch.model_copy(update={"run_dir": folder}),
        }
    )


def _baseline(job: configs.JobConfig, steps: int, folder: Path) -> Compared:
    """The closest job without cp_ring whose flags Megatron accepts."""
    cp, off = job.parallel.context_parallel_size, {"cp_ring": Options()}
    alone = job.parallel.model_copy(update={"context_parallel_size": 1})
    short = _short(job, steps, folder)
    reasons = []
    if commands.choose_device(job)[0] == "cpu":
        reasons.append("stock context parallelism needs GPUs")
    elif job.megatron.get("transformer_impl", "transformer_engine") != "transformer_engine":
        reasons.append(
            "stock context parallelism needs megatron.transformer_impl transformer_engine"
        )
    else:
        stock = short.model_copy(update=off)
        if not (reason := _rejection(stock)):
            return Compared(stock, f"stock, context parallel size {cp}", ())
        reasons.append(f"stock context parallelism: {reason}")
    one_rank = {"cp_comm_type": None, "hierarchical_context_parallel_sizes": None}
    at_one = {"parallel": alone, "megatron": {**short.megatron, **one_rank}}
    for changes, name in ((off, "stock"), ({}, "cp_ring")):
        name += ", context parallel size 1"
        candidate = short.model_copy(update={**at_one, **changes})
        if not (reason := _rejection(candidate)):
            return Compared(candidate, name, tuple(reasons))
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"compare: there is nothing to compare with: {'; '.join(reasons)}")


def _rejection(job: configs.JobConfig) -> str:
    """Why Megatron does not accept the job's flags, or ""."""
    try:
        commands.build_command(job)
    except ConfigError as error:
        return "; ".join(error.args)
    return ""


def train(path: Path) -> int:
    """Runs `cp-ring train` of a file in a process of its own, whose output goes to standard error.
    Returns the exit code.
    """
    standard_error = 2  # the number of its file, because a caller may have replaced the object
    return subprocess.run(
        [sys.executable, "-m", "cp_ring.tools", "train", str(path)], stdout=standard_error
    ).returncode


def summary(folder: Path) -> dict[str, Any]:
    """What steps.jsonl tells of a run: medians without the first step, losses, and exposed
    communication where it is sampled.
    """
    steps = progress.read(folder)
    if not steps:
        raise ConfigError(f"compare: {folder} has no steps: the job logged none")
    later, sampled = steps[1:] or steps, progress.timings(steps)
    exposed = {
        name: median(each[name] for each in sampled) if sampled else None
        for name in ("exposed_share", "exposed_ms")
    }
    return {
        "tokens_per_s": median(step["tokens per second"] for step in later),
        "memory_bytes": max(step["memory"] for step in steps),
        **exposed,
        "trace": [{name: step.get(name) for name in _TRACED} for step in steps],
    }


def difference(
    one: Sequence[dict[str, Any]],
    other: Sequence[dict[str, Any]],
) -> dict[str, float | None]:
    """The largest relative differences of losses and gradient norms, step by step."""
    largest: dict[str, float | None] = {}
    for name in ("lm loss", progress.GRADIENT_NORM):
        pairs = [
            (a[name], b[name])
            for a, b in zip(one, other, strict=False)
            if a.get(name) is not None and b.get(name) is not None
        ]
        largest[name] = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)
    return largest
