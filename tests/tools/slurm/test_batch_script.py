"""The batch script by itself: what it makes of endings, signals and names, with stand-ins for srun
and scontrol.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cp_ring.errors import ConfigError
from cp_ring.testing.rank_pool import LIMIT_S
from cp_ring.tools.slurm import attempts
from cp_ring.tools.slurm.batch_script import Resources, Script, lint, output_pattern, quote
from tests import needs

FOLDER = Path(__file__).resolve().parents[3] / "launch" / "slurm"
TEMPLATE = (FOLDER / "train.sbatch").read_text()
HOSTILE = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch hacked)",
    "`touch hacked`",
    "new\nline\n#SBATCH --nodes=9",
    "-n",
    "a;b&c|d",
    "%j*?",
]

SRUN = """#!/bin/bash
echo "$@" >>"$CALLS"
while [[ $1 != bash ]]; do
    [[ $1 != --ntasks=* ]] || tasks=${1#*=}
    shift
done
for ((i = 1; i < tasks; i++)); do touch "$5/started/$i"; done # only the first one is run
trap 'kill -USR1 $pid || :' USR1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1
(while [[ -e ${HOLD:-} ]]; do sleep 0.1; done; exec "$@") & pid=$! # slurmd may take its time to start a task
while wait $pid; kill -0 $pid 2>/dev/null; do :; done
wait $pid # a signal at the end has taken the place of the code
"""
SCONTROL = """#!/bin/bash
case $1 in show) printf 'n1\\nn2\\n' ;; *) echo "$@" >>"$CALLS" ;; esac
"""
GETENT = "#!/bin/bash\necho 127.0.0.1 STREAM n2\n"


class Machine:
    """Runs rendered scripts with srun and scontrol that only write down how they were called."""

    def __init__(self, folder):
        self.folder, self.calls = folder, folder / "calls"
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("getent", GETENT)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, run_dir, command, attempt=0, per_node=1, **settings):
        run_dir.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(FOLDER / "env.sh", run_dir / "env.sh")
        resources = Resources(nodes=2, ranks_per_node=per_node, gpus=False)
        script = Script(
            resources, run_dir, run_dir / "checkpoints", run_dir / "env.sh", command, **settings
        )
        path = self.folder / "job.sbatch"
        path.write_text(script.render(TEMPLATE))
        lint(path.read_text())
        slurm = {
            "JOB_ID": "7",
            "JOB_NUM_NODES": "2",
            "NTASKS": str(2 * per_node),
            "JOB_NODELIST": "n[1-2]",
            "RESTART_COUNT": str(attempt),
        }
        environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
        environment |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "CALLS": str(self.calls)}
        environment["HOLD"] = str(self.folder / "hold")
        return subprocess.Popen(
            ["bash", str(path)],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, run_dir, command, attempt=0, **settings):
        done = self.start(run_dir, command, attempt, **settings)
        output = done.communicate(timeout=LIMIT_S)[0]
        return done.returncode, output

    @property
    def requeues(self):
        return self.calls.read_text().splitlines().count("requeue 7") if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def reaches(run_dir, iteration, code):
    """A command that saves a checkpoint and ends with `code`."""
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return ["bash", "-c", f"mkdir -p {tracker.parent}; echo {iteration} >{tracker}; exit {code}"]


def test_done(machine, tmp_path):
    run_dir = tmp_path / "run"
    code, output = machine.run(
        run_dir, ["bash", "-c", f"touch {run_dir}/DONE; echo out of the rank"]
    )
    assert code == 0 and "done" in output and machine.requeues == 0
    assert (run_dir / "logs" / "7.0" / "rank0000-n1.log").read_text() == "out of the rank\n"
    assert (run_dir / "logs" / "7.0" / "hosts").read_text().split() == ["n1", "n2"]
    assert [(e.kind, e.reason) for e in attempts.read(run_dir)] == [("start", ""), ("stop", "done")]


def test_failure_with_progress_goes_on(machine, tmp_path):
    for attempt in range(4):
        code, _ = machine.run(
            tmp_path / "run", reaches(tmp_path / "run", 10 * (attempt + 1), 3), attempt
        )
        assert code == 3
    assert machine.requeues == 4
    assert attempts.read(tmp_path / "run")[-1].reason == "failed with exit code 3"


def test_crash_loop_ends_after_two_tries(machine, tmp_path):
    run_dir = tmp_path / "run"
    machine.run(run_dir, reaches(run_dir, 10, 1), 0)
    first, _ = machine.run(run_dir, ["false"], 1)
    second, output = machine.run(run_dir, ["false"], 2)
    assert (first, second) == (1, 1) and machine.requeues == 2
    assert "given up: failed with exit code 1, no new checkpoint in 2 tries" in output
    machine.run(run_dir, ["false"], 0)  # a new job begins to count anew
    assert machine.requeues == 3


def test_tries_whose_script_was_lost_count_too(machine, tmp_path):
    run_dir = tmp_path / "run"
    for attempt in range(2):
        lost = machine.start(run_dir, ["sleep", "60"], attempt)
        until(
            lambda attempt=attempt: (run_dir / "logs" / f"7.{attempt}" / "rank0000-n1.log").exists()
        )
        os.killpg(lost.pid, signal.SIGKILL)
        lost.communicate()
    code, output = machine.run(run_dir, ["true"], 2)
    assert code == 1 and "given up: no new checkpoint in 2 tries" in output


def until(happened, timeout_s=LIMIT_S):
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def obedient(run_dir):
    """A rank that saves and leaves when it is told to."""
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    code = (
        "import signal, sys, pathlib; signal.signal(signal.SIGUSR1, lambda *_: None); "
        f"pathlib.Path({str(run_dir / 'ready')!r}).touch(); signal.pause(); t = "
        f"pathlib.Path({str(tracker)!r}); t.parent.mkdir(); t.write_text('5')"
    )
    return [sys.executable, "-c", code]


def test_warning_is_passed_on_and_requeued(machine, tmp_path):
    run_dir = tmp_path / "run"
    script = machine.start(run_dir, obedient(run_dir))
    until((run_dir / "ready").exists)
    script.send_signal(signal.SIGUSR1)
    script.communicate(timeout=LIMIT_S)
    assert script.returncode == 0 and machine.requeues == 1
    assert attempts.read(run_dir)[-1] == attempts.Event(
        attempts.read(run_dir)[-1].time, "7", 0, "stop", 5, "warned"
    )


@pytest.mark.parametrize("late", ["task", "handler"])
def test_warning_before_the_rank_listens_is_not_lost_and_does_no_harm(machine, tmp_path, late):
    """Before the task has begun, a signal would end it; before Python handles the signal, it is
    ignored.
    """
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    held = tmp_path / "held"
    held.touch()
    if late == "task":
        hold.touch()
    code = (
        f"import pathlib, time\nwhile pathlib.Path({str(held)!r}).exists(): "
        f"time.sleep(0.1)\n{obedient(run_dir)[2]}"
    )
    script = machine.start(run_dir, [sys.executable, "-c", code])
    until(machine.calls.exists)
    script.send_signal(signal.SIGUSR1)
    for line in script.stdout:
        if line.endswith(" try 0: warned\n"):
            break
    hold.unlink(missing_ok=True)
    held.unlink()
    script.communicate(timeout=LIMIT_S)
    assert script.returncode == 0 and machine.requeues == 1
    assert (attempts.read(run_dir)[-1].reason, attempts.read(run_dir)[-1].iteration) == (
        "warned",
        5,
    )


def test_warning_before_training_begins_is_no_try(machine, tmp_path):
    """It comes while links are checked: nothing is trained, and the job is queued again however
    often this happens.
    """
    run_dir = tmp_path / "run"
    for attempt in range(4):
        check = [
            "bash",
            "-c",
            f"touch {tmp_path}/checks; while [[ -e {tmp_path}/checks ]]; do sleep 0.1; done",
        ]
        script = machine.start(run_dir, ["touch", f"{tmp_path}/trained"], attempt, preflight=check)
        until((tmp_path / "checks").exists)
        script.send_signal(signal.SIGUSR1)
        for line in script.stdout:
            if line.endswith(f" try {attempt}: warned\n"):
                break
        (tmp_path / "checks").unlink()
        script.communicate(timeout=LIMIT_S)
        assert script.returncode == 0 and machine.requeues == attempt + 1
    assert not (tmp_path / "trained").exists() and attempts.read(run_dir)[-1].reason == "warned"


def test_canceled_stays_canceled(machine, tmp_path):
    run_dir = tmp_path / "run"
    script = machine.start(run_dir, ["bash", "-c", f"touch {run_dir}/ready; sleep 1; exit 4"])
    until((run_dir / "ready").exists)
    script.send_signal(signal.SIGTERM)
    output = script.communicate(timeout=LIMIT_S)[0]
    assert (
        script.returncode == 4
        and machine.requeues == 0
        and output.endswith(": terminated by Slurm\n")
    )


def test_preflight_has_a_task_for_each_rank_under_torchrun_too(machine, tmp_path):
    machine.run(tmp_path / "run", ["true"], preflight=["true"], launcher="torchrun", per_node=3)
    asked = [
        line for line in machine.calls.read_text().splitlines() if line.startswith("--distribution")
    ]
    assert [line.split("--ntasks=")[1].split()[0] for line in asked] == ["6", "2"]


def test_failed_preflight_starts_no_training(machine, tmp_path):
    code, _ = machine.run(
        tmp_path / "run", ["touch", f"{tmp_path}/trained"], preflight=["bash", "-c", "exit 2"]
    )
    assert code == 2 and not (tmp_path / "trained").exists()


def test_order_of_hosts_from_a_file(machine, tmp_path):
    (tmp_path / "order").write_text("n9\nn2\nn1\n")
    machine.run(tmp_path / "run", ["true"], rank_order=tmp_path / "order")
    assert (tmp_path / "run" / "logs" / "7.0" / "hosts").read_text().split() == ["n2", "n1"]
    (tmp_path / "order").write_text("n9\nn2\n")
    code, output = machine.run(tmp_path / "run", ["true"], rank_order=tmp_path / "order")
    assert code == 2 and f"{tmp_path / 'order'} names 1 of the job's 2 hosts" in output


def test_torchrun_is_one_task_per_node(machine, tmp_path):
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/bash\nprintf \'%s\\n\' "$PET_NODE_RANK" "$@" >{tmp_path}/words; env '
        f">{tmp_path}/environment\n"
    )
    fake.chmod(0o755)
    machine.run(tmp_path / "run", [str(fake), "-m", "module", "--flag"], launcher="torchrun")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["0", "-m", "torch.distributed.run"] and words[-3:] == [
        "-m",
        "module",
        "--flag",
    ]
    assert "--nnodes=2" in words and "--nproc-per-node=1" in words and "--master-addr=n1" in words
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words[3:])
    # which comes again and again
    assert "SIGUSR1" not in read.signals_to_handle and read.training_script == "module"
    assert "PET_SHUTDOWN_TIMEOUT=600" in (tmp_path / "environment").read_text().splitlines()


@pytest.mark.parametrize("name", HOSTILE)
def test_names_reach_the_rank_as_they_are(machine, tmp_path, name):
    run_dir = tmp_path / name.replace("/", "_")
    code = "import sys, pathlib; folder = pathlib.Path(sys.argv[1]); "
    code += "(folder / 'words').write_text(repr(sys.argv[1:])); (folder / 'DONE').touch()"
    returned, _ = machine.run(run_dir, [sys.executable, "-c", code, str(run_dir), name])
    assert returned == 0
    assert eval((run_dir / "words").read_text()) == [str(run_dir), name]
    assert not list(tmp_path.rglob("hacked"))
    needs.programs("shellcheck")
    done = subprocess.run(
        ["shellcheck", "--exclude=SC2016", str(tmp_path / "job.sbatch")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", HOSTILE)
def test_quote(name):
    assert "\n" not in quote(name)
    assert subprocess.check_output(["bash", "-c", f"printf %s {quote(name)}"], text=True) == name


def test_directives_come_first_and_are_those_asked_for():
    resources = Resources(
        4,
        8,
        partition="gpu",
        account="lab",
        time="1-00:00:00",
        options=["--constraint=h100"],
        warn_seconds=300,
    )
    text = Script(resources, Path("/r"), Path("/r/c"), Path("/r/env.sh"), ["python"]).render(
        TEMPLATE
    )
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8"} < set(lines)
    assert {"--partition=gpu", "--account=lab", "--time=1-00:00:00"} < set(lines)
    assert {"--signal=B:USR1@300", "--requeue", "--constraint=h100", "--open-mode=append"} < set(
        lines
    )
    lint(text)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo", "the first line is not a #! line"),
        (
            "#!/bin/bash\necho\n#SBATCH --nodes=2\n",
            "line 3: '#SBATCH --nodes=2' comes after the first command (line 2)",
        ),
        ("#!/bin/bash\nif\n", "syntax error"),
    ],
)
def test_lint(script, words):
    with pytest.raises(ConfigError) as rejected:
        lint(script)
    assert words in str(rejected.value) and "\n" not in str(rejected.value)


def test_output_pattern():
    assert output_pattern(Path("/a%b/logs")) == "/a%%b/logs/job-%j.log"
    with pytest.raises(ConfigError, match="backslash"):
        output_pattern(Path("/a\\b"))


def test_shellcheck():
    needs.programs("shellcheck")
    here = Path(__file__).resolve().parents[1] / "slurm"
    scripts = [*(path for path in FOLDER.iterdir() if path.suffix != ".md"), *here.glob("*.sh")]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0 and len(scripts) >= 3, done.stdout


def env(command, **variables):
    """What sourcing env.sh with the arguments of `command` exports."""
    script = f"set --; source {shlex.quote(str(FOLDER / 'env.sh'))} {command}; env"
    kept = {"PATH": variables.pop("PATH", os.environ["PATH"])}
    done = subprocess.run(
        ["bash", "-c", script], env=kept | variables, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_environment_of_ranks(tmp_path):
    alone = env("", HOSTS="n1", SLURMD_NODENAME="n1", CPUS_PER_RANK="3")
    assert (
        alone["GLOO_SOCKET_IFNAME"] == alone["NCCL_SOCKET_IFNAME"] == "lo"
        and alone["OMP_NUM_THREADS"] == "3"
    )
    assert (
        env("", HOSTS="n1", SLURMD_NODENAME="n1", GLOO_SOCKET_IFNAME="ib0")["NCCL_SOCKET_IFNAME"]
        == "ib0"
    )
    assert "NCCL_IB_HCA" not in alone and env("", NCCL_IB_HCA="mlx5_0")["NCCL_IB_HCA"] == "mlx5_0"


@pytest.mark.parametrize(
    ("capability", "command", "value"),
    [
        ("9.0", "", "1"),
        ("8.0", "", "1"),
        ("10.0", "", None),
        ("9.0", "--use-megatron-fsdp", None),
        (None, "", None),
    ],
)
def test_cuda_connections(tmp_path, capability, command, value):
    if capability:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\necho {capability}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    elif shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    assert (
        env(command, PATH=f"{tmp_path}:{os.environ['PATH']}").get("CUDA_DEVICE_MAX_CONNECTIONS")
        == value
    )
