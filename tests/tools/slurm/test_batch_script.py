"""The batch script by itself: every outcome of its table, with stand-ins for srun and scontrol."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import needs
from tests.rank_pool import LIMIT_S

FOLDER = Path(__file__).resolve().parents[3] / "launch" / "slurm"
HOSTILE = "a b'c\"d$(touch hacked)`touch hacked`\n#SBATCH --nodes=9;%j"
REFUSED = "requeue refused: submit the job again"
SAVES = "--save saves --load saves --exit-signal-handler"
FLAGS = SAVES.split()

SRUN = """#!/bin/bash
# Runs the first task; of the others there is a log.
echo srun "$@" >>"$CALLS"
[[ " $* " == *" --export=ALL "* ]] || unset MASTER_ADDR HOSTS CP_RING_PROGRESS # a site's default
[[ -z ${PROLOG:-} ]] || echo "$PROLOG"
while [[ $1 == -* ]]; do shift; done
[[ $1 != bash ]] || touch "$5/rank0001-n2.log"
trap 'kill -USR1 $pid || :' USR1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1
(while [[ -e ${HOLD:-} ]]; do sleep 0.1; done; exec "$@") & pid=$! # a task may begin late
while wait $pid; kill -0 $pid 2>/dev/null; do :; done
wait $pid # a signal at the end has taken the place of the code
code=$?
[[ $code == 0 || -z ${KILLS_OTHERS:-} ]] || { echo "srun: error: n1: task 0: Exited with exit code $code" >&2; exit 143; }
exit $code
"""
SCONTROL = """#!/bin/bash
case $1 in show) printf 'n1\\nn2\\n' ;; *) echo "$@" >>"$CALLS"; exit ${REFUSES:-0} ;; esac
"""
SQUEUE = """#!/bin/bash
[[ $* != *"--jobs=${RUNS:-}" ]] || echo a job
"""
GETENT = "#!/bin/bash\necho 127.0.0.1 STREAM n2\n"


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """Runs the script with srun and scontrol that only write down how they were called."""

    def __init__(self, folder):
        self.folder, self.calls, self.logs = folder, folder / "calls", folder / "runs/slurm/7"
        self.tracker = folder / "save" / "latest_checkpointed_iteration.txt"
        self.state = self.logs / "state"
        (folder / "bin").mkdir()
        for name, text in (
            ("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("getent", GETENT),
        ):  # fmt: skip
            program(folder / "bin" / name, text)

    def start(self, *words, attempt=0, **more):
        slurm = {
            "JOB_ID": "7",
            "JOB_NUM_NODES": "2",
            "NTASKS": "2",
            "JOB_NODELIST": "n[1-2]",
            "RESTART_COUNT": str(attempt),
        }
        environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
        environment |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "CALLS": str(self.calls)}
        environment |= {"HOLD": str(self.folder / "hold"), "ENV_FILE": str(FOLDER / "env.sh")}
        environment["SETTLE"] = "0"
        return subprocess.Popen(
            ["bash", str(FOLDER / "train.sbatch"), *words], env=environment | more,
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *words, attempt=0, **more):
        """The exit code, the last line and all lines of a try."""
        done = self.start(*words, attempt=attempt, **more)
        output = done.communicate(timeout=LIMIT_S)[0]
        return done.returncode, output.splitlines()[-1].split(f" try {attempt}: ")[-1], output

    def outcome(self, *words, **more):
        """The exit code and the outcome of a try, and how often the job was queued again by then."""
        return self.named(*self.run(*words, **more)[:2])

    def named(self, code, last):
        return code, last.split(":")[0], self.requeues

    def begun(self, file, *words, **more):
        """The script of a try in which there is a file."""
        script = self.start(*words, **more)
        until((self.folder / file).exists)
        return script

    def warned(self, *words, **more):
        """The exit code and the last line of a try that is warned when its rank is ready."""
        script = self.begun("ready", *words, **more)
        (self.folder / "ready").unlink()
        warn(script)
        return end(script)

    @property
    def flags(self):
        """What the script asks for in each command."""
        folder = str(self.tracker.parent)
        return ("--save", folder, f"--load={folder}", "--exit-signal-handler")

    def python(self, code):
        """A rank that runs `code`."""
        return ("--", sys.executable, "-c", code, *self.flags)

    def bash(self, code):
        return ("--", "bash", "-c", code, *self.flags)

    def steps(self, reached, target, code=0, saved=None):
        """A rank of cp_ring that says how far it came."""
        save = f"echo {saved or reached} >{self.tracker}"
        return self.bash(f'{save}; echo {reached} {target} >"$CP_RING_PROGRESS"; exit {code}')

    def saves(self, iteration, code):
        """A rank that saves and ends with `code`."""
        return self.bash(f"echo {iteration} >{self.tracker}; exit {code}")

    def obedient(self, before="", save=True, after=""):
        """A rank that saves and leaves when it is told to."""
        return self.python(
            f"import signal, sys, pathlib, time\n{before}\n"
            "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
            f"pathlib.Path({str(self.folder / 'ready')!r}).touch(); signal.pause()\n"
            f"tracker = pathlib.Path({str(self.tracker)!r}); tracker.parent.mkdir(exist_ok=True)\n"
            + "tracker.write_text('5')" * save
            + f"\n{after}"
        )

    @property
    def requeues(self):
        return self.calls.read_text().splitlines().count("requeue 7") if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def until(happened):
    end = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def end(script):
    """The exit code and the last line of a script that runs."""
    output = script.communicate(timeout=LIMIT_S)[0]
    return script.returncode, output.splitlines()[-1].partition(": ")[2]


def warn(script):
    """Sends the warning, and waits until it was taken."""
    script.send_signal(signal.SIGUSR1)
    for line in script.stdout:
        if ": warned" in line:
            return


def test_finished_is_code_0_without_a_warning(machine):
    code, last, output = machine.run(*machine.saves(6, 0))
    assert (code, machine.requeues) == (0, 0)
    assert last == "finished: the ranks ended with exit code 0; iteration 0, now 6"
    assert "start at iteration 0 on n1 n2" in output
    assert (machine.logs / "try-0" / "hosts").read_text().split() == ["n1", "n2"]
    # queued again after that by hand: the ranks load the last checkpoint and have nothing to do
    assert machine.outcome(*machine.python("print('out')"), attempt=1) == (0, "finished", 0)
    assert (machine.logs / "try-1" / "rank0000-n1.log").read_text() == "out\n"


def test_failures_with_progress_go_on(machine):
    for attempt in range(4):
        code, last, _ = machine.run(*machine.saves(10 * (attempt + 1), 3), attempt=attempt)
        assert code == 3 and last.startswith("requeued: failed; the ranks ended with exit code 3")
    assert machine.requeues == 4


def test_two_tries_without_a_new_checkpoint_are_the_end(machine):
    fails = machine.python("raise ValueError('my own bug')")
    machine.run(*machine.saves(10, 1))
    code, last, output = machine.run(*fails, attempt=1)
    assert machine.named(code, last) == (1, "requeued", 2)
    assert "ValueError: my own bug\n" in output
    code, last, _ = machine.run(*fails, attempt=2)
    assert (code, machine.requeues) == (1, 2)
    assert last.startswith("given up: ") and last.endswith("; 2 tries without a new checkpoint")


@pytest.mark.parametrize("own", [False, True])
def test_checkpoints_beside_those_of_save_are_new_ones(machine, tmp_path, own):
    """Those of --non-persistent-ckpt-type global."""
    beside = tmp_path / "beside" if own else machine.tracker.parent / "non_persistent"
    tracker, flags = beside / machine.tracker.name, []
    if own:
        flags = ["--non-persistent-global-ckpt-dir", str(beside)]
    for attempt in range(3):
        words = machine.bash(f"mkdir -p {beside}; echo {attempt + 4} >{tracker}; exit 3")
        code, last, _ = machine.run(*words, *flags, attempt=attempt)
        assert code == 3 and last.startswith("requeued: failed; ")
        assert last.endswith(f"iteration {attempt and attempt + 3}, now {attempt + 4}")


def test_the_first_rank_that_failed_tells_the_code(machine):
    """srun ends with that of the ranks which it ended then."""
    code, last, output = machine.run(*machine.saves(10, 3), KILLS_OTHERS="1")
    assert code == 3 and last.startswith("requeued: failed; the ranks ended with exit code 3")
    assert "srun: error: n1: task 0: Exited with exit code 3\n" in output
    code, last, _ = machine.run(*machine.bash("exit 2"), attempt=1, KILLS_OTHERS="1")
    assert code == 2 and last.startswith("rejected: the ranks ended with exit code 2")


def test_ranks_that_end_before_the_steps_asked_for_go_on(machine):
    """By --exit-interval or --exit-duration-in-mins, or warned; the last try is over."""
    code, last, _ = machine.run(*machine.steps(5, 12))
    assert (code, machine.requeues) == (0, 1) and last == (
        "requeued: ended early; the ranks ended with exit code 0 after step 5 of 12; "
        "iteration 0, now 5"
    )
    assert machine.outcome(*machine.steps(10, 12), attempt=1) == (0, "requeued", 2)
    assert machine.outcome(*machine.steps(12, 12), attempt=2) == (0, "finished", 2)


def test_a_warning_in_the_last_step_needs_no_other_try(machine):
    done = "import os; pathlib.Path(os.environ['CP_RING_PROGRESS']).write_text('5 5')"
    code, last = machine.warned(*machine.obedient(after=done))
    assert machine.named(code, last) == (0, "finished", 0)


@pytest.mark.parametrize("saved", [45, 5])
def test_code_2_after_a_step_is_a_failure(machine, saved):
    """A rank can end with any code; a wrong flag shows before the first step."""
    machine.tracker.parent.mkdir()
    machine.tracker.write_text("5")
    code, last, _ = machine.run(*machine.steps(46, 100, code=2, saved=saved))
    assert (code, machine.requeues) == (2, 1) and last.startswith("requeued: failed; ")


def test_old_files_do_not_make_a_failure_a_success(machine):
    """A first step that fails, beside the state and the checkpoints of a job that had finished."""
    machine.run(*machine.saves(6, 0))
    (machine.logs / "DONE").touch()
    (machine.tracker.parent / "DONE").touch()
    machine.state.write_text("6 1\n")
    assert machine.outcome(*machine.bash("exit 1")) == (1, "requeued", 1)
    assert machine.outcome(*machine.bash("exit 1"), attempt=1) == (1, "given up", 1)


def test_tries_whose_script_was_lost_count_too(machine):
    for attempt in range(2):
        lost = machine.start(*machine.bash("sleep 60"), attempt=attempt)
        until((machine.logs / f"try-{attempt}" / "rank0000-n1.log").exists)
        os.killpg(lost.pid, signal.SIGKILL)
        lost.communicate()
    code, last, _ = machine.run(*machine.bash("true"), attempt=2)
    assert (code, last) == (1, "given up: 2 tries without a new checkpoint")


def test_warned_ranks_save_and_are_queued_again(machine):
    code, last = machine.warned(*machine.obedient())
    assert (code, machine.requeues) == (0, 1)
    assert last == "requeued: warned; the ranks ended with exit code 0; iteration 0, now 5"


def test_warned_twice_without_a_checkpoint_is_given_up(machine):
    for attempt, outcome in enumerate(("requeued", "given up")):
        code, last = machine.warned(*machine.obedient(save=False), attempt=attempt)
        assert machine.named(code, last) == (attempt, outcome, 1)


@pytest.mark.parametrize("rank", ["saves", "fails"])
def test_a_refused_requeue_is_a_failure_with_a_line(machine, rank):
    if rank == "saves":
        code, last = machine.warned(*machine.obedient(), REFUSES="1")
        assert last == f"{REFUSED}, it resumes from iteration 5"
    else:
        code, last, _ = machine.run(*machine.bash("false"), REFUSES="1")
        assert last.startswith(REFUSED)
    assert code == 75


@pytest.mark.parametrize("late", ["task", "handler"])
def test_a_warning_before_the_rank_listens_is_not_lost_and_does_no_harm(machine, tmp_path, late):
    """Before the task has begun, a signal would end it; before Python handles the signal, it is
    ignored.
    """
    hold, held = tmp_path / "hold", tmp_path / "held"
    held.touch()
    if late == "task":
        hold.touch()
    wait = f"while pathlib.Path({str(held)!r}).exists(): time.sleep(0.1)"
    script = machine.start(*machine.obedient(wait))
    until(machine.calls.exists)
    warn(script)
    hold.unlink(missing_ok=True)
    held.unlink()
    code, last = end(script)
    assert (code, machine.requeues, machine.tracker.read_text()) == (0, 1, "5"), last


def cp_ring(folder, text):
    """A stand-in for the Python that has cp_ring; as a rank it runs what it is given."""
    rank = '[[ $2 != cp_ring.pretrain_gpt ]] || exec "${@:3}"'
    split = f'[[ $1 != -c ]] || exec {sys.executable} "$@"'
    program(folder / "python", f"#!/bin/bash\n{rank}\n{split}\n{text}\n")
    return {"PYTHON": str(folder / "python")}


def test_a_yaml_file_becomes_the_command_of_the_ranks(machine, tmp_path):
    shown = shlex.join(["echo", "the flags", *machine.flags])
    line = f"env A=1 python -m torch.distributed.run -m cp_ring.pretrain_gpt \\\n  {shown}"
    given = cp_ring(tmp_path, f'echo "$*" >asked; printf %s {shlex.quote(line)}')
    machine.tracker.parent.mkdir()
    machine.tracker.write_text("7")
    code, last, _ = machine.run("my.yaml", "--set", "a.b=c", **given)
    assert code == 0 and last.endswith("iteration 7, now 7")
    asked = (tmp_path / "asked").read_text()
    assert (
        asked == "-m cp_ring.tools train my.yaml --set a.b=c --print-flags --set launch.ranks=2\n"
    )
    log = (machine.logs / "try-0" / "rank0000-n1.log").read_text()
    assert log == f"the flags {' '.join(machine.flags)}\n"


def test_a_warning_before_the_ranks_are_started_is_no_try(machine, tmp_path):
    wait = f"touch {tmp_path}/reads; while [[ -e {tmp_path}/reads ]]; do sleep 0.1; done"
    given = cp_ring(
        tmp_path, f"{wait}; echo -m cp_ring.pretrain_gpt touch trained {shlex.join(FLAGS)}"
    )
    for attempt in range(4):
        script = machine.begun("reads", "my.yaml", attempt=attempt, **given)
        script.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        (tmp_path / "reads").unlink()
        assert end(script) == (0, "requeued: warned before the ranks were started")
    assert machine.requeues == 4 and not (tmp_path / "trained").exists()


@pytest.mark.parametrize("command", ["exit 4", "exit 0"])
def test_canceled_stays_canceled(machine, command):
    script = machine.begun("ready", *machine.bash(f"touch ready; sleep 1; {command}"))
    script.send_signal(signal.SIGTERM)
    code, last = end(script)
    assert (code, machine.requeues) == (4 if command == "exit 4" else 143, 0)
    assert last.startswith("canceled: ")


def test_canceled_while_the_yaml_file_is_read(machine, tmp_path):
    given = cp_ring(tmp_path, f"touch {tmp_path}/reads; sleep 1; exit 1")
    script = machine.begun("reads", "my.yaml", **given)
    script.send_signal(signal.SIGTERM)
    code, last = end(script)
    assert machine.named(code, last) == (2, "canceled", 0)


REJECTED = {
    "": "give a YAML file, or -- and a command",
    "my.yaml": "my.yaml, see the line above",
    f"-- bash -c 'exit 2' {SAVES}": "the ranks ended with exit code 2",
    "-- bash job.sh": "--save is not in the command, so no try could save and",
    "-- true --save=s --exit-signal-handler": "--load is not in the command",
    "-- true --save saves --load saves": "--exit-signal-handler is not in the command",
    f"-- torchrun --nproc-per-node 2 train.py {SAVES}":
        "torchrun would start in each of the 2 tasks, which are the ranks: leave it out",
    f"-- python -m torch.distributed.run train.py {SAVES}":
        "torchrun would start in each of the 2 tasks, which are the ranks: leave it out",
    f"-- true --ckpt-step 4 {SAVES}": "--ckpt-step: each try would begin",
    f"-- true --finetune {SAVES}": "--finetune: each try would begin",
    "-- true --save /proc/saves --load saves --exit-signal-handler":
        "--save /proc/saves cannot be",
    "-- true --load b --save saves --exit-signal-handler": "--load b is not --save ",
}  # fmt: skip


@pytest.mark.parametrize(
    "words, settings, why",
    [
        ("-- true", {"ENV_FILE": "nosuch.sh"}, "ENV_FILE nosuch.sh: no such file"),
        (
            f"-- true {SAVES}",
            {"SLURM_JOB_NUM_NODES": "3"},
            "the hosts (n1 n2) are not the job's 3",
        ),
        (f"-- true {SAVES}", {"SLURM_NTASKS": "3"}, "3 tasks do not divide among 2 nodes"),
        (
            f"-- torchrun --nnodes=2 train.py {SAVES}",
            {"SLURM_NTASKS": "4"},
            "torchrun would start in each of the 4 tasks, which are the ranks: leave it out, or",
        ),
        *((words, {}, why) for words, why in REJECTED.items()),
    ],
)
def test_what_no_other_try_could_mend_is_rejected(machine, tmp_path, words, settings, why):
    code, last, _ = machine.run(*shlex.split(words), **cp_ring(tmp_path, "exit 2"), **settings)
    assert (code, machine.requeues) == (2, 0) and last.startswith(f"rejected: {why}")


@pytest.mark.parametrize(
    "owner, code",
    [("6 here", 2), ("6 elsewhere", 0), ("5 here", 0), ("7 here", 0), ("", 0), ("x y z", 0)],
)
def test_a_folder_in_which_another_job_saves_is_rejected(machine, owner, code):
    """Job 6 runs, and this one is 7; numbers on another cluster are those of other jobs."""
    mark = machine.tracker.with_name("slurm_job")
    mark.parent.mkdir()
    mark.write_text(owner)
    found, last, _ = machine.run(*machine.bash("true"), RUNS="6", SLURM_CLUSTER_NAME="here")
    assert found == code and last.startswith("rejected: job 6, which runs, saves in ") == (code > 0)
    assert mark.read_text() == (owner if code else "7 here\n") and machine.requeues == 0


def test_of_two_jobs_that_start_at_once_one_is_left(machine, tmp_path):
    mark = machine.tracker.with_name("slurm_job")
    both = [
        machine.start(*machine.bash("true"), SLURM_JOB_ID=number, SETTLE="3") for number in "89"
    ]
    ended = dict(zip("89", map(end, both), strict=True))
    left = mark.read_text().strip()
    (other,) = {*ended} - {left}
    assert ended[left][0] == 0 and ended[left][1].startswith("finished")
    assert ended[other] == (2, f"rejected: job {left}, which runs, saves in {mark.parent}: "
                            "cancel one of the two, or give another folder")  # fmt: skip


def test_names_reach_the_rank_as_they_are(machine, tmp_path):
    code = "import sys, pathlib; pathlib.Path('words').write_text(repr(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *FLAGS, HOSTILE, ""]
    returned, _, _ = machine.run("--", *command)
    assert returned == 0 and eval((tmp_path / "words").read_text()) == [*FLAGS, HOSTILE, ""]
    (tmp_path / "words").unlink()
    line = f"torchrun -m cp_ring.pretrain_gpt {shlex.join(command)}"
    text = f"printf %s {shlex.quote(line)}"
    returned, _, _ = machine.run("my.yaml", **cp_ring(tmp_path, text), PROLOG="touch hacked")
    assert returned == 0 and eval((tmp_path / "words").read_text()) == [*FLAGS, HOSTILE, ""]
    assert not list(tmp_path.rglob("hacked"))


def test_torchrun_in_one_task_of_each_node_is_a_command(machine, tmp_path):
    program(tmp_path / "bin/torchrun", '#!/bin/bash\necho "$@"\n')
    code, last, _ = machine.run("--", "torchrun", "--nnodes=2", "train.py", *FLAGS)
    assert code == 0 and last.startswith("finished")


def test_a_rank_that_fails_ends_the_others(machine):
    machine.run("--", "true", *FLAGS)
    (call,) = (line for line in machine.calls.read_text().splitlines() if "--wait=60" in line)
    assert "--kill-on-bad-exit=1" in call and "--distribution=arbitrary" in call


def test_the_table_names_every_outcome():
    text = (FOLDER / "train.sbatch").read_text()
    named = set(re.findall(r"^#   ([a-z][a-z ]+?)  ", text, re.MULTILINE))
    said = set(re.findall(r"finish \"?([a-z ]+)\"? [\"0-9]", text)) | {
        "requeue refused",
        "canceled",
    }
    assert said == named - {"outcome of a try"} and len(said) == 6


def test_shellcheck():
    needs.programs("shellcheck")
    scripts = [*FOLDER.iterdir(), *FOLDER.parent.glob("*.sh"), *Path(__file__).parent.glob("*.sh")]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0 and len(scripts) >= 4, done.stdout


def env(command, **variables):
    """What sourcing env.sh with the arguments of `command` exports."""
    script = f"set --; source {shlex.quote(str(FOLDER / 'env.sh'))} {command}; env"
    kept = {"PATH": variables.pop("PATH", os.environ["PATH"])}
    done = subprocess.run(
        ["bash", "-c", script], env=kept | variables, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_environment_of_ranks():
    alone = env("", HOSTS="n1", SLURMD_NODENAME="n1", CPUS_PER_RANK="3")
    assert alone["GLOO_SOCKET_IFNAME"] == alone["NCCL_SOCKET_IFNAME"] == "lo"
    assert alone["OMP_NUM_THREADS"] == "3" and "NCCL_IB_HCA" not in alone
    chosen = env("", HOSTS="n1", GLOO_SOCKET_IFNAME="ib0", NCCL_IB_HCA="mlx5_0")
    assert chosen["NCCL_SOCKET_IFNAME"] == "ib0" and chosen["NCCL_IB_HCA"] == "mlx5_0"


@pytest.mark.parametrize(
    "capability, command, value",
    [
        ("9.0", "", "1"),
        ("10.0", "", None),
        ("9.0", "--use-megatron-fsdp", None),
        (None, "", None),
    ],
)
def test_cuda_connections(tmp_path, capability, command, value):
    if capability:
        program(tmp_path / "nvidia-smi", f"#!/bin/bash\necho {capability}\n")
    elif shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    exported = env(command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert exported.get("CUDA_DEVICE_MAX_CONNECTIONS") == value
