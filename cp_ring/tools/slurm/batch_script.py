"""A job's batch script for Slurm: its resources, its text, and a check of the text."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cp_ring.errors import ConfigError, one_line

_BEGIN, _END = "# ---- settings\n", "# ---- end of settings\n"
_NAME = re.compile(r"[\w.,@:+=/-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")


# Options of sbatch that the job has already, or that would break its restarts: what to do instead.
_OWN = {
    **{name: f"give --{name}" for name in ("nodes", "partition", "account", "qos", "time")},
    "job-name": "give --name",
    "cpus-per-task": "give --cpus-per-rank",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task"),
        "the job has one task for each rank: give --gpus-per-node or --ranks-per-node instead",
    ),
    "signal": "give --warn-seconds: the batch script itself must be warned",
    **dict.fromkeys(("no-requeue", "requeue"), "the job queues itself again until it is done"),
    **dict.fromkeys(("output", "open-mode"), "each try adds to the log in the run directory"),
    "array": "jobs of one array would train in one run directory; submit each by itself",
    **dict.fromkeys(("wrap", "test-only", "parsable"), "it is for sbatch without cp-ring submit"),
}


@dataclass(frozen=True)
class Resources:
    """What a job asks Slurm for.

    gpus: whether each rank has a GPU. options: more sbatch options, which stay unchanged.
    """

    nodes: int
    ranks_per_node: int
    gpus: bool = True
    name: str = "cp_ring"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus_per_rank: int | None = None
    warn_seconds: int = 120
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        for flag, value in (("--nodes", self.nodes), (self.per_node_flag, self.ranks_per_node)):
            if value < 1:
                raise ConfigError(f"{flag} {value}: it must be at least 1")
        if self.cpus_per_rank is not None and self.cpus_per_rank < 1:
            raise ConfigError(f"--cpus-per-rank {self.cpus_per_rank}: it must be at least 1")
        if not 10 <= self.warn_seconds <= 65535:
            raise ConfigError(f"--warn-seconds {self.warn_seconds}: Slurm takes 10 to 65535")
        for flag in ("partition", "account", "qos", "name"):
            value = getattr(self, flag)
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(f"--{flag} {value!r}: Slurm does not allow such a name")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r}: Slurm reads minutes, H:MM:SS or D-HH:MM:SS")
        if self.time is not None and self.warn_seconds >= limit_seconds(self.time):
            raise ConfigError(
                f"--warn-seconds {self.warn_seconds}: --time {self.time} is "
                f"{limit_seconds(self.time)} s, which leaves no time to train; lower "
                "--warn-seconds or raise --time"
            )
        for option in self.options:
            if not re.fullmatch(r"--[a-z][\w-]*(=\S+)?", option):
                raise ConfigError(
                    f"--slurm {option!r}: expected one sbatch option, such as --constraint=h100"
                )
            word = option[2:].partition("=")[0]
            # sbatch takes the beginning of a name for the name
            for name in (each for each in _OWN if each.startswith(word)):
                raise ConfigError(f"--slurm {option!r}: {_OWN[name]}")

    @property
    def per_node_flag(self) -> str:
        return "--gpus-per-node" if self.gpus else "--ranks-per-node"

    @property
    def ranks(self) -> int:
        """Ranks of all nodes together."""
        return self.nodes * self.ranks_per_node

    def directives(self) -> list[str]:
        """The sbatch options of the job."""
        values: dict[str, object] = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "gpus-per-node": self.ranks_per_node if self.gpus else None,
            "cpus-per-task": self.cpus_per_rank,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "signal": f"B:USR1@{self.warn_seconds}",
            "open-mode": "append",
        }
        options = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return [*options, "--requeue", *self.options]


@dataclass(frozen=True)
class Script:
    """The parts of a job's batch script. Paths are absolute, on a shared file system."""

    resources: Resources
    run_dir: Path
    checkpoints: Path
    env_file: Path
    command: Sequence[str]
    preflight: Sequence[str] = ()
    launcher: Literal["srun", "torchrun"] = "srun"
    rank_order: Path | None = None
    srun_options: Sequence[str] = field(default=())

    def render(self, template: str) -> str:
        """`template` (launch/slurm/train.sbatch) with this job's #SBATCH lines and settings."""
        lines = template.splitlines(keepends=True)
        first = next(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
        kept = [line for line in lines[first:] if not line.startswith("#SBATCH")]
        options = [f"#SBATCH {option}\n" for option in self.resources.directives()]
        head, rest = "".join([*lines[:first], *options, *kept]).split(_BEGIN)
        return head + _BEGIN + self._settings() + _END + rest.split(_END)[1]

    def _settings(self) -> str:
        words = {
            "RUN_DIR": self.run_dir,
            "CHECKPOINTS": self.checkpoints,
            "ENV_FILE": self.env_file,
            "LAUNCHER": self.launcher,
            "RANK_ORDER": self.rank_order or "",
            "MAX_STALE": 2,
        }
        lists = {
            "preflight": self.preflight,
            "srun_options": self.srun_options,
            "command": self.command,
        }
        lines = [f"{name}={quote(str(value))}" for name, value in words.items()]
        lines += [f"{name}=({' '.join(map(quote, values))})" for name, values in lists.items()]
        return "".join(f"{line}\n" for line in lines)


def limit_seconds(time: str) -> int:
    """A time limit as Slurm reads it: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, more = [*parts, 0, 0][:3]
    else:
        hours, (minutes, more) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + more


def quote(word: str) -> str:
    """`word` quoted for bash, on one line, because Slurm could read a second line as a #SBATCH
    line.
    """
    if word.isprintable():
        return shlex.quote(word)
    escapes = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}
    return (
        "$'"
        + "".join(escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in word)
        + "'"
    )


def output_pattern(folder: Path) -> str:
    """The value of sbatch's --output for a file in `folder`; percent signs of `folder` are escaped.
    Raises `ConfigError`.
    """
    if "\\" in str(folder):
        raise ConfigError(
            f"launch.run_dir {str(folder)!r}: Slurm cannot write to a path with a backslash"
        )
    return str(folder).replace("%", "%%") + "/job-%j.log"


def lint(script: str) -> None:
    """Raises `ConfigError` for mistakes that Slurm ignores or finds only on the node."""
    if not script.startswith("#!"):
        raise ConfigError("batch script: the first line is not a #! line")
    command = 0
    for number, line in enumerate(script.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            command = command or number
        elif command and line.startswith("#SBATCH"):
            raise ConfigError(
                f"batch script, line {number}: {line!r} comes after the first command (line "
                f"{command}), so Slurm ignores it"
            )
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if checked.returncode:
        raise ConfigError(f"batch script: {one_line(checked.stderr)}")
