"""A real Slurm on this machine for as long as the tests need it, and the jobs on it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import yaml

from cp_ring.observe import progress
from cp_ring.testing.rank_pool import LIMIT_S
from tests.tools.slurm.job import TINY

HERE = Path(__file__).parent
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
)


class Cluster:
    """Nodes n1, n2, ... of 8 cores, each with its own network and processes; `folder` is shared by
    all.
    """

    def __init__(self, folder: Path, nodes: int = 2, **environment: str):
        self.folder = folder
        line = [
            str(HERE / "with_slurm.sh"),
            "-n",
            str(nodes),
            "-d",
            str(folder),
            "sleep",
            "infinity",
        ]
        self.log = (folder / "cluster.log").open("w+")
        self._process = subprocess.Popen(
            line, env=os.environ | environment, stdout=self.log, stderr=self.log
        )

    def wait_until_up(self) -> None:
        self.until(lambda: self._init() is not None)
        self.until(
            lambda: (
                self.run("squeue").returncode == 0
                and "idle" in self.run("sinfo", "-h", "-o", "%t").stdout
            )
        )

    def _init(self) -> int | None:
        """The first process of the cluster's namespaces."""
        pid = self._process.pid
        if self._process.poll() is not None:
            self.log.seek(0)
            raise RuntimeError(f"the cluster did not start: {self.log.read()[-3000:]}")
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None

    def line(self, *command: str) -> list[str]:
        """`command` inside the cluster's namespaces."""
        return [
            "nsenter",
            f"--target={self._init()}",
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--wdns=/",
            "--",
            *command,
        ]

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE")
        }
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONWARNINGS": "ignore"}

    def run(self, *command: str, timeout: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def until(
        self, happened: Callable[[], object], timeout: float = LIMIT_S, every: float = 0.25
    ) -> None:
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout} s: {happened}")
            time.sleep(every)

    def kill_node(self, name: str) -> None:
        """The node is gone, with every process on it."""
        self.run("kill", "-KILL", (self.folder / "run" / f"node.{name}.pid").read_text().strip())

    def start_node(self, name: str) -> None:
        subprocess.Popen(
            self.line(str(HERE / "node.sh"), name),
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)  # and with it everything in its namespaces
        self._process.wait()
        self.log.close()


class Job:
    """A tiny training on the cluster, submitted with cp-ring submit."""

    def __init__(self, cluster: Cluster, name: str, *options: str, **settings: object):
        self.cluster, self.run_dir = cluster, cluster.folder / name
        path = cluster.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(TINY))
        wanted = {
            "launch.run_dir": str(self.run_dir),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        words = [
            word
            for key, value in wanted.items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        size = [] if "--nodes" in options else ["--nodes", "2", "--ranks-per-node", "2"]
        line = [
            sys.executable,
            "-m",
            "cp_ring.tools",
            "submit",
            str(path),
            *size,
            *words,
            *options,
        ]
        done = cluster.run(*line)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.split("cp_ring: job ")[1].split(";")[0]

    def facts(self) -> dict[str, str]:
        words = self.cluster.run(
            "scontrol", "--oneliner", "show", "job", self.number
        ).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.facts().get("JobState", "")

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    def trace(self) -> dict[int, float]:
        """Step to loss; a step that was done twice must have had the same loss."""
        losses: dict[int, float] = {}
        for line in progress.read(self.run_dir):
            loss = line["lm loss"]
            assert abs(losses.setdefault(line["step"], loss) - loss) <= 1e-6, line
        return losses

    @property
    def step(self) -> int:
        steps = progress.read(self.run_dir)
        return steps[-1]["step"] if steps else 0

    @property
    def saved(self) -> int:
        tracker = self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.is_file() else 0

    @property
    def starts(self) -> list[int]:
        """The iteration from which each try started."""
        lines = (self.run_dir / "attempts.tsv").read_text().splitlines()
        return [int(line.split("\t")[4]) for line in lines if line.split("\t")[3] == "start"]

    def processes(self) -> list[psutil.Process]:
        """All that name this job's run directory, on any node."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.run_dir) in word for word in process.cmdline()):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The ranks, without what starts them and what they fork."""
        lines = {process.pid: (process, process.cmdline()) for process in self.processes()}
        own = {
            pid: process
            for pid, (process, line) in lines.items()
            if "python" in line[0]
            and "cp_ring.pretrain_gpt" in line[:4]
            and "torch.distributed.run" not in line
        }
        return [process for process in own.values() if process.ppid() not in own]

    def reach(self, step: int, timeout: float = LIMIT_S) -> None:
        """Waits until training has done `step`."""
        turns = itertools.count()  # a question to Slurm costs a process
        self.cluster.until(
            lambda: self.step >= step or (next(turns) % 10 == 9 and self.state in ENDED), timeout
        )
        assert self.state not in ENDED, self.logs()

    def end(self, timeout: float = LIMIT_S) -> str:
        """Waits until the job is over and returns its state; no process of it may be left."""
        self.cluster.until(lambda: self.state in ENDED, timeout, every=1.0)
        self.cluster.until(lambda: not self.processes())
        return self.state

    def warn(self) -> None:
        """Sends the batch script the warning before a time limit, until it has come: a daemon may
        drop a signal.
        """
        log = self.run_dir / "logs" / f"job-{self.number}.log"

        def warned() -> bool:
            return f" try {self.restarts}: warned\n" in log.read_text() or self.state in ENDED

        while not warned():
            done = self.cluster.run("scancel", "--batch", "--signal=USR1", self.number)
            assert done.returncode == 0, done.stderr
            with contextlib.suppress(TimeoutError):
                self.cluster.until(warned, 20, every=1.0)

    def status(self) -> dict[str, object]:
        done = self.cluster.run(
            sys.executable, "-m", "cp_ring.tools", "status", str(self.run_dir), "--json"
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def logs(self) -> str:
        paths = sorted((self.run_dir / "logs").rglob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in paths)


@contextlib.contextmanager
def running(nodes: int = 2, **environment: str) -> Iterator[Cluster]:
    """A cluster in a folder that all may enter, as munge demands."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder), nodes, **environment)
        try:
            cluster.wait_until_up()
            yield cluster
        finally:
            cluster.close()
