"""A real Slurm on this machine for as long as the tests need it, and the jobs on it."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from tests.rank_pool import LIMIT_S
from tests.tools.slurm.job import TINY

HERE = Path(__file__).parent
SCRIPT = HERE.parents[2] / "launch" / "slurm" / "train.sbatch"
PRINTED = 4e-6  # 1e-6, and the last digit that Megatron prints
_STEP = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")
TRACKER = "latest_checkpointed_iteration.txt"
ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    "OUT_OF_MEMORY",
)  # fmt: skip


class Cluster:
    """Nodes n1 and n2 of 8 cores, each with its own network and processes; `folder` is shared by
    all.
    """

    def __init__(self, folder, **environment):
        self.folder = folder
        line = [str(HERE / "with_slurm.sh"), "-d", str(folder), "sleep", "infinity"]
        self.log = (folder / "cluster.log").open("w+")
        self._process = subprocess.Popen(
            line, env=os.environ | environment, stdout=self.log, stderr=self.log
        )

    def wait_until_up(self):
        self.until(lambda: self._init() is not None)
        self.until(
            lambda: (
                self.run("squeue").returncode == 0
                and "idle" in self.run("sinfo", "-h", "-o", "%t").stdout
            )
        )

    def _init(self):
        """The first process of the cluster's namespaces."""
        pid = self._process.pid
        if self._process.poll() is not None:
            self.log.seek(0)
            raise RuntimeError(f"the cluster did not start: {self.log.read()[-3000:]}")
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None

    def line(self, *command):
        """`command` inside the cluster's namespaces."""
        inside = ["--mount", "--pid", "--net", "--uts", "--wdns=/", "--"]
        return ["nsenter", f"--target={self._init()}", *inside, *command]

    @property
    def environment(self):
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE")
        }
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONWARNINGS": "ignore"}

    def run(self, *command):
        return subprocess.run(
            self.line(*command), env=self.environment, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip

    def until(self, happened, timeout=LIMIT_S, every=0.25):
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout} s: {happened}")
            time.sleep(every)

    def kill_node(self, name):
        """The node is gone, with every process on it."""
        self.run("kill", "-KILL", (self.folder / "run" / f"node.{name}.pid").read_text().strip())

    def start_node(self, name):
        subprocess.Popen(
            self.line(str(HERE / "node.sh"), name),
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

    def close(self):
        self._process.send_signal(signal.SIGKILL)  # and with it everything in its namespaces
        self._process.wait()
        self.log.close()


class Job:
    """A tiny training on the cluster, by launch/slurm/train.sbatch, from a YAML file with
    `settings`, or a command.
    """

    def __init__(self, cluster, name, *options, ranks=4, command=(), **settings):
        self.cluster, self.run_dir = cluster, cluster.folder / name
        self.checkpoints = self.run_dir / "checkpoints"
        path = cluster.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(TINY))
        wanted = {
            "launch.run_dir": str(self.run_dir),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        sets = [f"{key}={json.dumps(value)}" for key, value in wanted.items()]
        given = [word for one in sets for word in ("--set", one)]
        self.run_dir.mkdir()
        size = ["--nodes=2", f"--ntasks-per-node={ranks // 2}", "--gpus-per-node=0"]
        done = cluster.run(
            "env", f"PYTHON={sys.executable}", f"LOGS={self.run_dir}/logs",
            f"ENV_FILE={SCRIPT.with_name('env.sh')}",
            "sbatch", "--parsable", *size, f"--output={self.run_dir}/job.log", "--signal=B:USR1@10",
            f"--chdir={cluster.folder}", *options, str(SCRIPT),
            *(["--", *command] if command else [str(path), *given]),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def facts(self):
        words = self.cluster.run(
            "scontrol", "--oneliner", "show", "job", self.number
        ).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self):
        return self.facts().get("JobState", "")

    @property
    def restarts(self):
        return int(self.facts()["Restarts"])

    def trace(self):
        """Step to loss; a step that was done twice must have had the same loss."""
        losses = {}
        for step, loss in self._steps():
            first = losses.setdefault(step, loss)
            assert abs(first - loss) <= PRINTED, (step, first, loss)
        return losses

    def _steps(self):
        """The steps of all tries, from the logs of the ranks that have the loss. The second line
        after a start is Megatron's mean of two steps.
        """
        found = []
        for log in sorted(self.run_dir.glob("logs/try-*/rank*.log")):
            lines = _STEP.findall(log.read_text(errors="replace"))
            losses = [float(loss) for _, loss in lines]
            if len(losses) > 1:
                losses[1] = 2 * losses[1] - losses[0]
            found += [(int(step), loss) for (step, _), loss in zip(lines, losses, strict=True)]
        return found

    @property
    def step(self):
        return max((step for step, _ in self._steps()), default=0)

    @property
    def saved(self):
        tracker = self.checkpoints / TRACKER
        return int(tracker.read_text()) if tracker.is_file() else 0

    @property
    def log(self):
        """What the batch script has printed."""
        path = self.run_dir / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def starts(self):
        """The iteration from which each try started."""
        return [*map(int, re.findall(r"start at iteration (\d+)", self.log))]

    def processes(self):
        """All that name this job's run directory, on any node."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.run_dir) in word for word in process.cmdline()):
                    found.append(process)
        return found

    def ranks(self):
        """The ranks, without what starts them and what they fork."""
        lines = {process.pid: (process, process.cmdline()) for process in self.processes()}
        own = {
            pid: process
            for pid, (process, line) in lines.items()
            if "python" in line[0] and {"cp_ring.pretrain_gpt", "cp_ring.run"} & {*line[:4]}
        }
        return [process for process in own.values() if process.ppid() not in own]

    def reach(self, step):
        """Waits until training has done `step`."""
        turns = itertools.count()  # a question to Slurm costs a process
        self.cluster.until(
            lambda: self.step >= step or (next(turns) % 10 == 9 and self.state in ENDED)
        )
        assert self.state not in ENDED, self.logs()

    def end(self):
        """Waits until the job is over and returns its state; no process of it may be left."""
        self.cluster.until(lambda: self.state in ENDED, every=1.0)
        self.cluster.until(lambda: not self.processes())
        return self.state

    def warn(self):
        """Sends the batch script the warning before a time limit, until it has come: a daemon may
        drop a signal.
        """
        line = f" try {self.restarts}: warned"
        while line not in self.log and self.state not in ENDED:
            done = self.cluster.run("scancel", "--batch", "--signal=USR1", self.number)
            assert done.returncode == 0, done.stderr
            with contextlib.suppress(TimeoutError):
                self.cluster.until(lambda: line in self.log, 20, every=1.0)

    def logs(self):
        paths = [self.run_dir / "job.log", *sorted((self.run_dir / "logs").rglob("*.log"))]
        found = [path for path in paths if path.exists()]
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in found)


@contextlib.contextmanager
def running(**environment):
    """A cluster in a folder that all may enter, as munge demands."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder), **environment)
        try:
            cluster.wait_until_up()
            yield cluster
        finally:
            cluster.close()
