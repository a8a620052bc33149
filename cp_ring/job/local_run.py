"""Which process of which host runs a job without Slurm: a record in the run directory, for `cp-ring status`."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

FILE = "launcher.json"


def begin(run_dir: Path) -> None:
    """Records that this process launches the ranks of the run."""
    import psutil

    record = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (run_dir / FILE).write_text(json.dumps(record) + "\n")


def state(run_dir: Path) -> str | None:
    """Whether the process of the record still runs, for a person; None where the run was never started without Slurm."""
    import psutil

    try:
        record = json.loads((run_dir / FILE).read_text())
        host, pid, started = str(record["host"]), int(record["pid"]), float(record["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
    if host != socket.gethostname():
        return f"started on {host} at {since}, process {pid}; ask there whether it runs"
    try:
        alive = psutil.Process(pid).create_time() == started  # a process number is used again
    except psutil.Error:
        alive = False
    return f"running on this host since {since}, process {pid}" if alive else f"stopped; it was started at {since}"
