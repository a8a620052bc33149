"""`cp-ring submit` and `cp-ring status` without a Slurm: what is written, what is said."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.job import job_config as config
from cp_ring.tools.job.train import record_job
from cp_ring.tools.slurm import attempts
from cp_ring.tools.slurm.batch_script import Resources
from cp_ring.tools.slurm.status import show, status
from cp_ring.tools.slurm.submit import Site, build_script, check_resources, submit
from tests.tools.slurm.job import TINY


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
    )
    return str(path)


CPU = Resources(nodes=2, ranks_per_node=2, gpus=False)


def test_dry_run_prints_the_script_and_touches_nothing(file, tmp_path, capsys):
    assert submit(file, CPU, Site(), dry_run=True) is None
    shown = capsys.readouterr()
    assert "#SBATCH --nodes=2\n" in shown.out and f"RUN_DIR={tmp_path}/run\n" in shown.out
    assert (
        "--context-parallel-size 4" in shown.out
        and "--cp-ring-cpu" in shown.out
        and "--exit-signal-handler" in shown.out
    )
    assert "sbatch --job-name=" in shown.err and "--requeue" in shown.err
    assert f" --output={tmp_path}/run/logs/job-%j.log {tmp_path}/run/job.sbatch" in shown.err
    assert "cp_ring: the first on node0 node0 node1 node1\ncp_ring: hop 1: " in shown.err
    assert not (tmp_path / "run").exists()


def test_rank_order_names_the_hosts_of_the_dry_run(file, tmp_path, capsys):
    (tmp_path / "order").write_text("n7\nn3\nn1\n")
    submit(file, CPU, Site(rank_order=tmp_path / "order"), dry_run=True)
    shown = capsys.readouterr()
    assert "the first on n7 n7 n3 n3" in shown.err and f"RANK_ORDER={tmp_path}/order\n" in shown.out
    (tmp_path / "order").write_text("n7\n")
    with pytest.raises(ConfigError, match="it names 1 hosts for --nodes 2"):
        submit(file, CPU, Site(rank_order=tmp_path / "order"), dry_run=True)


def test_container(file, tmp_path):
    site = Site(container_image="nvcr.io#nvidia/pytorch:26.10-py3", container_mounts="/data:/data")
    script, _ = build_script(config.load(file), CPU, site, [])
    assert script.command[0] == "python3"
    assert "--container-image=nvcr.io#nvidia/pytorch:26.10-py3" in script.srun_options
    assert f"--container-mounts={tmp_path}/run:{tmp_path}/run,/data:/data" in script.srun_options


SBATCH = """#!/bin/bash
echo "$@" >>{log}
case $* in *--test-only*--output=*) exit {code} ;; esac
echo "12;cluster"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A sbatch and a squeue that only say what they were told to; set(code, queue)."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()

    def set_up(code=0, queue=""):
        for name, text in (
            ("sbatch", SBATCH.format(log=log, code=code)),
            ("squeue", f"#!/bin/bash\necho '{queue}'\n"),
        ):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return log

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return set_up


def test_submit_tests_first_and_says_where_to_look(file, tmp_path, slurm, capsys):
    log, run = slurm(), tmp_path / "run"
    run.mkdir()
    progress.finish(str(run), 3)
    assert submit(file, CPU, Site()) == "12"
    tested, submitted = log.read_text().splitlines()
    assert (
        tested.startswith("--test-only")
        and submitted.startswith("--parsable")
        and submitted.endswith(f"{run}/job.sbatch")
    )
    assert (run / "logs").is_dir() and (run / "env.sh").is_file() and not (run / "DONE").exists()
    said = capsys.readouterr().out
    assert (
        f"job 12; output: {run}/logs/job-12.log" in said
        and f"cp-ring status {run}" in said
        and "scancel 12" in said
    )
    assert attempts.last_job(run) == "12"


def test_recorded_run_dir_is_absolute(file, tmp_path, slurm, monkeypatch):
    slurm()
    monkeypatch.chdir(tmp_path)
    submit(file, CPU, Site(), ["launch.run_dir=here"])
    assert config.load("here/job.yaml").launch.run_dir == tmp_path / "here"


def test_what_slurm_would_reject_is_not_submitted(file, tmp_path, slurm):
    log = slurm(code=1)
    with pytest.raises(ConfigError, match="sbatch --test-only"):
        submit(file, CPU, Site())
    assert len(log.read_text().splitlines()) == 1 and not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("of an earlier job")
    with pytest.raises(ConfigError, match="sbatch --test-only"):
        submit(file, CPU, Site())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["job.yaml"]


def test_second_job_in_the_same_folder_is_rejected(file, slurm):
    slurm()
    submit(file, CPU, Site())
    slurm(queue="RUNNING|n[1-2]")
    with pytest.raises(ConfigError, match="job 12 is RUNNING there"):
        submit(file, CPU, Site())


def test_status_of_a_run(file, tmp_path, slurm):
    slurm()
    submit(file, CPU, Site())
    run = tmp_path / "run"
    assert (
        status(run)["state"] == "job 12 is not in the queue" and status(run)["checkpoint"] is None
    )
    for step in (1, 2):
        progress.append(str(run), step, {"lm loss": 4.5 - step})
    with (run / "steps.jsonl").open("a") as torn:
        torn.write('{"step": 3, "lm lo')
    progress.append(str(run), 3, {"lm loss": 1.25})
    now = int(time.time())
    lines = [
        (now, 12, 0, "start", 0, ""),
        (now, 12, 0, "stop", 2, "failed with exit code 1"),
        (now, 12, 1, "start", 2, ""),
    ]
    with (run / "attempts.tsv").open("a") as file:
        file.writelines("\t".join(map(str, line)) + "\n" for line in lines)
    logs = run / "logs" / "12.0"
    logs.mkdir(parents=True)
    (logs / "rank0001-n1.log").write_text("step 2\nTraceback:\n  File\nRuntimeError: out of luck\n")
    slurm(queue="RUNNING|n[1-2]")
    facts = status(run)
    assert facts["state"] == "RUNNING, job 12 (n[1-2])" and (
        facts["step"],
        facts["loss"],
        facts["restarts"],
    ) == (3, 1.25, 1)
    assert (
        facts["last_stop"]
        == "failed with exit code 1, at iteration 2 of try 0; rank0001-n1: RuntimeError: out of "
        "luck"
    )
    assert "3 of 6, loss 1.2500" in show(facts)
    assert [step["step"] for step in progress.read(run)] == [1, 2, 3]


def test_status_finds_checkpoints_from_any_folder(tmp_path, monkeypatch):
    path, elsewhere = tmp_path / "tiny.yaml", tmp_path / "elsewhere"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
    )
    job = config.load(str(path), ["megatron.save=saves"])
    for name in ("iter_0000002", "iter_0000010.bak"):
        (elsewhere / "saves" / name).mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    record_job(job, None)
    monkeypatch.chdir(tmp_path)
    assert "iter_0000002 is not whole" in status(tmp_path / "run")["checkpoint"]


def test_status_names_a_try_that_ended_without_a_word(file, tmp_path, slurm):
    slurm()
    submit(file, CPU, Site())
    with (tmp_path / "run" / "attempts.tsv").open("a") as file:
        file.writelines(
            f"{int(time.time())}\t12\t{restart}\tstart\t{4 * restart}\t\n" for restart in (0, 1)
        )
    assert "try 0 from iteration 0 ended without a record" in status(tmp_path / "run")["last_stop"]
    slurm(queue="")
    progress.finish(str(tmp_path / "run"), 6)
    assert status(tmp_path / "run")["state"] == "DONE"


def test_status_command_prints_json(tmp_path):
    (tmp_path / "job.yaml").write_text("megatron: {train_iters: 3}")
    line = [sys.executable, "-m", "cp_ring.tools", "status", str(tmp_path), "--json"]
    assert json.loads(subprocess.check_output(line, text=True))["state"] == "not started"
    with pytest.raises(ConfigError, match=r"no job\.yaml"):
        status(tmp_path / "nothing")


def test_status_of_a_run_without_slurm(tmp_path):
    (tmp_path / "job.yaml").write_text("megatron: {train_iters: 3}")
    code = (
        "import sys, pathlib; from cp_ring.tools.job import local_run; "
        "local_run.begin(pathlib.Path(sys.argv[1])); print(1); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline() == b"1\n"
        assert re.fullmatch(
            rf"running on this host since .*, process {launcher.pid}", status(tmp_path)["state"]
        )
        launcher.communicate(b"\n")
    assert status(tmp_path)["state"].startswith("stopped; it was started at ")
    record = json.loads((tmp_path / "launcher.json").read_text())
    # the number of another process now
    (tmp_path / "launcher.json").write_text(json.dumps(record | {"pid": os.getpid()}))
    assert status(tmp_path)["state"].startswith("stopped")
    (tmp_path / "launcher.json").write_text(json.dumps(record | {"host": "elsewhere"}))
    assert status(tmp_path)["state"].startswith("started on elsewhere at ")
    progress.finish(str(tmp_path), 3)
    assert status(tmp_path)["state"] == "DONE"


def test_right_sizes_pass(file):
    check_resources(config.load(file), CPU, file)
    check_resources(
        config.load(file, ["parallel.data_parallel_size=2"]),
        Resources(nodes=4, ranks_per_node=2, gpus=False),
        file,
    )


def test_every_path_in_the_script_is_absolute(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script, line = build_script(config.load(file, ["launch.run_dir=here"]), CPU, Site(), [])
    assert (
        script.run_dir == tmp_path / "here"
        and line[-1] == f"{tmp_path}/here/job.sbatch"
        and Path(script.checkpoints).is_absolute()
    )
