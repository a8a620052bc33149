"""Training on a real Slurm of two nodes, by launch/slurm/train.sbatch, through all that ends a job
before its time.

Whatever happens, the losses of all tries together are those of a run that nobody disturbed, no step
before the last checkpoint is done again, and no process is left. The slow tests are a command:
`pytest -m slow tests/tools/slurm`.
"""

import functools
import os
import sys

import pytest
import yaml

from cp_ring.tools import job as config
from tests import needs
from tests.megatron.launch import trace, train
from tests.tools.slurm.cluster import ENDED, PRINTED, TRACKER, Job, running
from tests.tools.slurm.job import TINY, data_that_fails

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster at a time
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter")
CP2 = {"ranks": 2, "megatron__context_parallel_size": 2}
CP2_DP2 = {"megatron__context_parallel_size": 2}


def needs_cluster():
    """Skips the calling test or fixture where there can be no cluster."""
    needs.programs(*PROGRAMS)
    if os.geteuid():
        needs.skip_or_fail("only root can make the namespaces of a test cluster")


@pytest.fixture(scope="module")
def cluster():
    needs_cluster()
    with running() as made:
        yield made


@pytest.fixture
def watchful():
    """A cluster that takes a node for lost after 10 s without a word."""
    needs_cluster()
    with running(SLURMD_TIMEOUT="10") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of the job on one rank without context parallelism, which nobody disturbs, for
    each number of steps.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))

    @functools.cache
    def losses(train_iters=6):
        nothing_saved = [
            f"megatron.{name}=null" for name in ("save", "load", "tensorboard_dir", "save_interval")
        ]
        alone = [
            "megatron.context_parallel_size=1",
            "cp_ring.enabled=false",
            f"megatron.train_iters={train_iters}",
        ]
        job = config.load(str(path), [*nothing_saved, *alone, f"launch.run_dir={folder}"])
        name = f"{train_iters} steps"
        train(1, {name: config.megatron_flags(job, None, "cpu")[0]}, folder, [])
        found = {step: line["loss"] for step, line in trace(folder, name).items()}
        assert sorted(found) == list(range(1, train_iters + 1))
        return found

    return losses


def same(job, expected):
    """The whole trace is there and is that of the undisturbed run; no try began before the last
    checkpoint that was there.
    """
    found = job.trace()
    assert sorted(found) == sorted(expected), job.logs()
    assert max(abs(found[step] - expected[step]) for step in expected) <= PRINTED
    assert job.starts == sorted(job.starts)
    return True


def completes(job):
    assert job.end() == "COMPLETED", job.logs()


def kill_a_rank(job, index, of=4):
    ranks = job.ranks()
    assert len(ranks) == of, ranks
    ranks[index].kill()


def long(cluster, name):
    """A job of one rank on each node: nearly all of its time is the start of the ranks."""
    settings = {"megatron__save_interval": 40, "megatron__train_iters": 80}
    return Job(cluster, name, cp_ring__certify=False, **settings, **CP2)


@pytest.mark.ci
def test_submitted_killed_finished(cluster):
    job = long(cluster, "killed")
    job.reach(45)
    kill_a_rank(job, os.getpid() % 2, of=2)
    completes(job)
    assert job.starts == [0, 40] and sorted(job.trace()) == list(range(1, 81)), job.logs()
    assert " try 0: requeued: failed; " in job.log and " try 1: finished: " in job.log


@pytest.mark.ci
def test_warned_ranks_are_queued_again(cluster):
    """Commands in place of Megatron's ranks, which start at once."""
    saves = cluster.folder / "saved"
    rank = (
        "import os, pathlib, signal, sys\n"
        "if 'SLURM_RESTART_COUNT' in os.environ: sys.exit()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        f"saves = pathlib.Path({str(saves)!r}); saves.mkdir(exist_ok=True)\n"
        "(saves / os.environ['SLURM_PROCID']).touch(); signal.pause()\n"
        f"(saves / {TRACKER!r}).write_text('5')\n"
    )
    flags = ["--save", str(saves), "--load", str(saves), "--exit-signal-handler"]
    job = Job(cluster, "warned", ranks=2, command=[sys.executable, "-c", rank, *flags])
    cluster.until(lambda: len([*saves.glob("[01]")]) == 2 or job.state in ENDED)
    job.warn()
    completes(job)
    assert " try 0: requeued: warned; " in job.log and "iteration 0, now 5" in job.log, job.logs()
    assert " try 1: finished: " in job.log and job.restarts == 1


@pytest.mark.slow
def test_warned_while_its_ranks_train_and_while_they_load(cluster):
    job = long(cluster, "warned-twice")
    job.reach(45)
    job.warn()
    cluster.until(lambda: [*job.run_dir.glob("logs/try-1/rank*")])
    saved = job.saved
    job.warn()
    completes(job)
    assert 45 <= saved == job.starts[1] < job.starts[2] and len(job.starts) == 3
    assert sorted(job.trace()) == list(range(1, 81)), job.logs()
    assert " try 0: requeued: warned; " in job.log and " try 1: requeued: warned; " in job.log
    assert " try 2: finished: " in job.log and "SIGUSR1: saving, then ending" in job.logs()


@pytest.mark.slow
def test_ended_early_then_finished(cluster):
    """By --exit-interval, of which a YAML file and a wrapper around the ranks can both know."""
    settings = {"megatron__exit_interval": 4, "cp_ring__certify": False}
    job = Job(cluster, "early", **settings, **CP2)
    completes(job)
    assert job.starts == [0, 4] and sorted(job.trace()) == [1, 2, 3, 4, 5, 6], job.logs()
    assert " try 0: requeued: ended early; " in job.log and "after step 4 of 6" in job.log
    assert " try 1: finished: " in job.log and "after step 6 of 6" in job.log


@pytest.mark.ci
def test_commands_that_cannot_go_on_and_code_2_after_a_step(cluster):
    saves = f"{cluster.folder}/saves"
    flags = ["--save", saves, "--load", saves, "--exit-signal-handler"]
    for name, command, line in [
        ("no-save", ["python", "train.py"], "rejected: --save is not in the command"),
        ("launcher", ["torchrun", "--nproc-per-node", "2", "x.py", *flags], "rejected: torchrun "),
        ("wrong", ["bash", "-c", "exit 2", *flags], "rejected: the ranks ended with exit code 2"),
    ]:
        job = Job(cluster, name, ranks=2, command=command)
        assert job.end() == "FAILED" and f" try 0: {line}" in job.log, job.logs()
        assert job.restarts == 0
    step = (
        'if [[ $SLURM_PROCID == 0 ]]; then echo $((5 * (SLURM_RESTART_COUNT + 1))) 10 >"$CP_RING_PROGRESS"; fi; '
        "until [[ -s $CP_RING_PROGRESS ]]; do sleep 0.1; done; "  # Slurm ends it with the other
        "exit $((SLURM_RESTART_COUNT ? 0 : 2))"
    )
    job = Job(cluster, "code-2", ranks=2, command=["bash", "-c", step, *flags])
    completes(job)
    assert (
        " try 0: requeued: failed; the ranks ended with exit code 2 after step 5 of 10" in job.log
    )
    assert " try 1: finished: " in job.log and job.restarts == 1


@pytest.mark.slow
def test_an_error_in_python_ends_the_job_with_workers_of_the_data_loader_too(cluster):
    """One try; nobody waits for a time limit, and no worker is left."""
    settings = data_that_fails(cluster.folder) | {"megatron.mock_data": None}
    once = "--export=ALL,MAX_TRIES=1"
    job = Job(cluster, "python-error", once, **settings, **CP2)
    assert job.end() == "FAILED", job.logs()
    assert job.restarts == 0 and " given up: " in job.log, job.logs()
    assert "Error: " in job.logs() and not job.trace()


@pytest.mark.slow
def test_canceled_stays_canceled(cluster):
    job = Job(cluster, "canceled", megatron__train_iters=2000, **CP2)
    job.reach(2)
    runs = ["squeue", "--noheader", "--states=RUNNING,SUSPENDED", f"--jobs={job.number}"]
    assert cluster.run(*runs).stdout.strip()  # as the batch script asks for others
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    # ranks save on SIGTERM
    assert job.restarts == 0 and job.saved >= 2 and " canceled: " in job.log, job.logs()
    assert not cluster.run(*runs).stdout.strip()
    assert (job.checkpoints / "slurm_job").read_text().split()[0] == job.number


@pytest.mark.slow
def test_lost_node(watchful, undisturbed):
    """The node that does not hold the batch script, then the one that does."""
    expected = undisturbed()
    job = Job(watchful, "node-lost", megatron__save_interval=2, **CP2_DP2)
    for node, step in (("n2", 3), ("n1", 5)):
        job.reach(step)
        watchful.kill_node(node)
        tries = job.restarts
        watchful.until(lambda tries=tries: job.restarts > tries)
        watchful.start_node(node)
    completes(job)
    assert job.starts[1] >= 2 and same(job, expected)


@pytest.mark.slow
def test_preempted_then_requeued(cluster, undisturbed):
    job = Job(cluster, "preempted", megatron__train_iters=60)
    job.reach(2)
    (cluster.folder / "urgent.sh").write_text("#!/bin/bash\nsleep 3\n")
    options = ("--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    urgent = cluster.run("sbatch", *options, f"{cluster.folder}/urgent.sh")
    assert urgent.returncode == 0, urgent.stderr
    cluster.until(lambda: job.restarts == 1)
    assert job.saved >= 2, job.logs()
    completes(job)
    assert job.starts[1] >= 2 and same(job, undisturbed(60))


@pytest.mark.slow
def test_time_limit(cluster):
    """Slurm's clock has a resolution of a minute: a limit of one minute warns at once when the lead
    is 50 s.
    """
    options = ("--signal=B:USR1@30", "--time=1")
    job = Job(cluster, "time-limit", *options, megatron__train_iters=2000)
    cluster.until(lambda: job.restarts == 1)
    assert job.saved == job.step > 0 and " requeued: warned; " in job.log, job.logs()
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    assert job.starts[1:] in ([], [job.saved]) and job.trace()
