"""A record in the run directory of the process and the host that run a job without Slurm, for
`cp-ring status`.
"""

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

    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }
    (run_dir / FILE).write_text(json.dumps(record) + "\n")


def state(run_dir: Path) -> str | None:
    """Whether the recorded process still runs, as text; None if there is no record."""
    import psutil

    try:
        record = json.loads((run_dir / FILE).read_text())
        host = str(record["host"])
        pid = int(record["pid"])
        started = float(record["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
    if host != socket.gethostname():
        return (
            f"started on {host} at {since}, process {pid}; ask on that host whether it still runs"
        )
    try:
        # another process may have got the same number
        alive = psutil.Process(pid).create_time() == started
    except psutil.Error:
        alive = False
    return (
        f"running on this host since {since}, process {pid}"
        if alive
        else f"stopped; it was started at {since}"
    )
