"""Training on a real Slurm of two nodes and four ranks, through all that ends a job before its
time.

Whatever happens, the losses of all tries together are those of a run that nobody disturbed, no step
before the last checkpoint is done again, and no process is left.
"""

import functools
import os
from pathlib import Path

import pytest
import yaml

from cp_ring.tools.job import command_line
from cp_ring.tools.job import job_config as config
from tests import needs
from tests.megatron.launch import trace, train
from tests.tools.slurm.cluster import Job, running
from tests.tools.slurm.job import TINY

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster at a time
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter")
QUICK = ("--warn-seconds", "10", "--no-preflight")
CP4 = {"parallel__context_parallel_size": 4}
CP2 = {"parallel__context_parallel_size": 2}
A_RANK_PER_NODE = ("--nodes", "2", "--ranks-per-node", "1")
CP2_DP2 = {"parallel__context_parallel_size": 2, "parallel__data_parallel_size": 2}


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
            "parallel.context_parallel_size=1",
            "cp_ring.enabled=false",
            f"megatron.train_iters={train_iters}",
        ]
        job = config.load(str(path), [*nothing_saved, *alone, f"launch.run_dir={folder}"])
        name = f"{train_iters} steps"
        train(1, {name: command_line.megatron_flags(job, None, "cpu")[0]}, folder, [])
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
    assert max(abs(found[step] - expected[step]) for step in expected) <= 1e-6
    assert job.starts == sorted(job.starts)
    return True


LAUNCH = Path(__file__).resolve().parents[3] / "launch" / "slurm"
SLOW = """# Before the warning has come, the ranks of the second try do not start Python.
[[ $SLURM_RESTART_COUNT != 1 ]] || until grep -q 'try 1: warned$' "{logs}/job-$SLURM_JOB_ID.log"; do sleep 1; done
source {environment}
"""


def kill_a_rank(job, index, of=4):
    ranks = job.ranks()
    assert len(ranks) == of, ranks
    ranks[index].kill()


@pytest.mark.ci
def test_rank_killed_then_warned_then_finished(cluster, undisturbed):
    """With one rank on each node: nearly all of the time is the start of the ranks, three times."""
    settings = {
        "megatron__save_interval": 20,
        "megatron__train_iters": 300,
        "cp_ring__certify": False,
    }
    slow = cluster.folder / "slow.sh"
    slow.write_text(
        SLOW.format(logs=cluster.folder / "killed" / "logs", environment=LAUNCH / "env.sh")
    )
    job = Job(
        cluster, "killed", *QUICK, *A_RANK_PER_NODE, "--env-file", str(slow), **settings, **CP2
    )
    job.reach(25)
    kill_a_rank(job, os.getpid() % 2, of=2)
    # until then a warning ends the job before it begins to train
    cluster.until(lambda: [*job.run_dir.glob("logs/*.1/started/*")])
    killed_at = job.saved
    assert killed_at >= 20 and "failed" in job.status()["last_stop"]
    job.warn()  # before any of its ranks has started Python
    assert job.end() == "COMPLETED", job.logs()
    assert job.starts[1] == killed_at < job.starts[2] and same(job, undisturbed(300))
    assert job.status()["state"] == "DONE" and "SIGUSR1: saving, then ending" in job.logs()


@pytest.mark.ci
def test_canceled_stays_canceled(cluster):
    size = ("--nodes", "2", "--ranks-per-node", "1")
    job = Job(
        cluster,
        "canceled",
        *QUICK,
        *size,
        megatron__train_iters=2000,
        parallel__context_parallel_size=2,
    )
    job.reach(2)
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    assert job.restarts == 0 and not (job.run_dir / "DONE").exists()
    # ranks save on SIGTERM
    assert job.saved >= 2 and job.status()["last_stop"].startswith("terminated by Slurm")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_data_parallel_ranks_killed(cluster, undisturbed, launcher):
    expected = undisturbed()
    job = Job(
        cluster,
        f"killed-{launcher}",
        *QUICK,
        "--launcher",
        launcher,
        megatron__save_interval=2,
        **CP2_DP2,
    )
    job.reach(3)
    kill_a_rank(job, 2)
    assert job.end() == "COMPLETED", job.logs()
    assert job.restarts == 1 and job.starts[1] >= 2 and same(job, expected)


@pytest.mark.slow
def test_torchrun_saves_when_warned(cluster, undisturbed):
    job = Job(
        cluster,
        "warned-torchrun",
        *QUICK,
        "--launcher",
        "torchrun",
        megatron__train_iters=60,
        **CP4,
    )
    job.reach(2)
    job.warn()
    assert job.end() == "COMPLETED", job.logs()
    assert job.restarts == 1 and same(job, undisturbed(60))


@pytest.mark.slow
def test_lost_node(watchful, undisturbed):
    """The node that does not hold the batch script, then the one that does."""
    expected = undisturbed()
    job = Job(watchful, "node-lost", *QUICK, megatron__save_interval=2, **CP2_DP2)
    for node, step in (("n2", 3), ("n1", 5)):
        job.reach(step)
        watchful.kill_node(node)
        tries = job.restarts
        watchful.until(lambda tries=tries: job.restarts > tries)
        watchful.start_node(node)
    assert job.end() == "COMPLETED", job.logs()
    assert job.starts[1] >= 2 and same(job, expected)


@pytest.mark.slow
def test_silently_lost_link(watchful, undisturbed):
    """Nothing is closed and nothing is rejected: the node only does not answer any more, for a
    while.
    """
    job = Job(
        watchful, "link-lost", *QUICK, megatron__save_interval=2, megatron__train_iters=60, **CP4
    )
    job.reach(5)
    watchful.run("ip", "link", "set", "v2", "down")
    watchful.until(lambda: job.restarts == 1)
    watchful.run("ip", "link", "set", "v2", "up")
    assert job.end() == "COMPLETED", job.logs()
    assert job.starts[1] >= 4 and same(job, undisturbed(60))


@pytest.mark.slow
def test_preempted_then_requeued(cluster, undisturbed):
    job = Job(cluster, "preempted", *QUICK, megatron__train_iters=60, **CP4)
    job.reach(2)
    (cluster.folder / "urgent.sh").write_text("#!/bin/bash\nsleep 3\n")
    options = ("--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    urgent = cluster.run("sbatch", *options, f"{cluster.folder}/urgent.sh")
    assert urgent.returncode == 0, urgent.stderr
    cluster.until(lambda: job.restarts == 1)
    assert job.saved >= 2, job.logs()
    assert job.end() == "COMPLETED", job.logs()
    assert job.starts[1] >= 2 and same(job, undisturbed(60))


@pytest.mark.slow
def test_time_limit(cluster, undisturbed):
    """Slurm's clock has a resolution of a minute: a limit of one minute warns at once when the lead
    is 50 s.
    """
    options = ("--warn-seconds", "30", "--no-preflight", "--time", "1")
    job = Job(cluster, "time-limit", *options, megatron__train_iters=2000, **CP4)
    cluster.until(lambda: job.restarts == 1)
    assert job.saved == job.step > 0 and job.status()["last_stop"].startswith("warned"), job.logs()
    cluster.run("scancel", job.number)
    assert job.end() == "CANCELLED"
    assert job.starts[1:] in ([], [job.saved]) and job.trace()


@pytest.mark.slow
def test_crash_loop_is_given_up(cluster):
    """A model that every rank fails to build, in spite of all that can be checked before."""
    job = Job(cluster, "crash-loop", *QUICK, megatron__make_vocab_size_divisible_by=0, **CP4)
    assert job.end() == "FAILED"
    assert job.restarts == 1 and not (job.run_dir / "DONE").exists()
    stop = job.status()["last_stop"]
    assert stop.startswith("given up") and "in 2 tries" in stop and "ZeroDivisionError" in stop


FAKE_PYTHON = """#!/bin/bash
folder="${@: -1}"
printf '%s\\0' "$@" >"$folder/words.$RANK"
[[ $RANK != 0 ]] || touch "$folder/DONE"
"""


@pytest.mark.slow
def test_hostile_names_through_slurm(cluster):
    """What ranks are started with, and where Slurm writes; a stand-in for their Python notes it
    down.
    """
    fake = cluster.folder / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    name = "a b'c\"d$(touch hacked)`touch hacked`\n#SBATCH --nodes=9;%j"
    job = Job(cluster, name, *QUICK, "--python", str(fake), **CP4)
    assert job.end() == "COMPLETED", job.logs()
    for rank in range(4):
        words = (job.run_dir / f"words.{rank}").read_text().split("\0")
        assert words[-3:] == ["--cp-ring-run-dir", str(job.run_dir), ""] and words[:2] == [
            "-m",
            "cp_ring.pretrain_gpt",
        ]
    assert ": done" in (job.run_dir / "logs" / f"job-{job.number}.log").read_text()
    assert not list(cluster.folder.rglob("hacked"))
