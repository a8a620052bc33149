"""What preflight finds in the facts of the ranks, and what it does alone and on several ranks."""

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from cp_ring.errors import ConfigError, PlanError
from cp_ring.observe import links
from cp_ring.observe.links import BETWEEN, INSIDE, LinkSpeed
from cp_ring.plan.sizes import device_rates as rates
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.testing.rank_pool import LIMIT_S
from cp_ring.tools.cli import app
from cp_ring.tools.job import job_config as config
from cp_ring.tools.slurm import attention_plan, preflight
from cp_ring.tools.slurm.placement import context_groups
from cp_ring.tools.slurm.preflight import World
from cp_ring.tools.slurm.preflight_checks import Facts, judge, summary
from cp_ring.tools.slurm.preflight_links import measure, write_links
from tests.tools.slurm.job import TINY


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
    )
    return config.load(str(path))


def healthy(rank, **changes):
    facts = Facts(
        rank=rank,
        host=f"n{1 + rank // 2}",
        address=f"10.0.0.{1 + rank // 2}",
        interface="eth0",
        config_hash="abc",
        versions={"torch": "2.13.0", "Python": "3.12.1"},
        clock=1000.0 + rank / 100,
        writable="",
        shared=True,
        free=10**12,
        flops=1e12,
        gpu={
            "index": rank % 2,
            "name": "H100",
            "free": 79 * 2**30,
            "total": 80 * 2**30,
            "uncorrected_errors": 0,
        },
        links=[LinkSpeed(hop, (rank - hop) % 4, rank, 1e9 + rank, 1e-4) for hop in (1, 2, 3)],
    )
    return dataclasses.replace(facts, **changes)


def lines(job, changes):
    found = judge(job, [healthy(rank, **changes.get(rank, {})) for rank in range(4)])
    return [("error " if problem.fatal else "warning ") + problem.line for problem in found]


def test_nothing_is_found_where_nothing_is_wrong(job):
    assert lines(job, {}) == []


HOPS = (1, 2, 3)
GPU = {"index": 1, "name": "H100", "free": 79 * 2**30, "total": 80 * 2**30, "uncorrected_errors": 0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {3: {"config_hash": "abd"}},
            "error rank 3 on n2 reads a different job.yaml than rank 0 on n1",
        ),
        (
            {2: {"versions": {"torch": "2.12.0", "Python": "3.12.1"}}},
            "error rank 2 on n2 has torch 2.12.0, rank 0 on n1",
        ),
        (
            {2: {"interface": "", "address": "127.0.1.1"}},
            "error n2: its name resolves to 127.0.1.1, which no other host can reach",
        ),
        ({0: {"interface": "lo"}}, "error n1: GLOO_SOCKET_IFNAME is lo"),
        (
            {2: {"writable": "Read-only file system"}},
            "error launch.run_dir cannot be written on n2: Read-only file system",
        ),
        ({2: {"shared": False}}, "error launch.run_dir is a different directory on n2 than on n1"),
        ({2: {"free": 10**8}}, "warning launch.run_dir has 0.1 GiB free on n2"),
        ({2: {"clock": 1090.0}, 3: {"clock": 1000.0}}, "warning the clock of n2 is +90 s off"),
        ({1: {"gpu": {}}}, "error GPUs differ: n1 has H100, n1 has none"),
        ({1: {"gpu": GPU | {"name": "A100"}}}, "warning GPUs differ: n1 has A100, n1 has H100"),
        (
            {3: {"gpu": GPU | {"uncorrected_errors": 7}}},
            "error GPU 1 of n2: 7 uncorrected memory errors",
        ),
        (
            {3: {"gpu": GPU | {"free": 20 * 2**30}}},
            "warning GPU 1 of n2: only 20 of 80 GiB are free",
        ),
        ({3: {"flops": 4e11}}, "warning slow rank 3 on n2: 400.0 GFLOP/s, the median is 1,000.0"),
        (
            {
                r: {
                    "links": [
                        LinkSpeed(h, (r - h) % 4, r, 1e6 if (r - h) % 4 > 1 else 1e9, 1e-4)
                        for h in HOPS
                    ]
                }
                for r in (0, 1)
            },
            "warning slow link n2 -> n1 (hop 1, rank 3 to 0): 1.0 MB/s, better links 1,000.0",
        ),
    ],
)
def test_each_is_named_on_a_line(job, changes, line):
    found = lines(job, changes)
    assert [entry for entry in found if entry.startswith(line)], found
    assert len(found) == 1 and "\n" not in found[0]


def test_sizes(job):
    assert (
        "section parallel makes 4 ranks, but 6 were started"
        in judge(job, [healthy(rank) for rank in range(6)])[0].line
    )
    uneven = [
        healthy(0),
        healthy(1),
        healthy(2),
        healthy(3, host="n3"),
        *[healthy(rank) for rank in (2, 3)],
    ][:5]
    assert "5 ranks do not divide by 3 nodes" in [problem.line for problem in judge(job, uneven)]
    parallel = job.parallel.model_copy(
        update={"tensor_model_parallel_size": 4, "context_parallel_size": 1}
    )
    wide = job.model_copy(update={"parallel": parallel})
    (problem,) = judge(wide, [healthy(rank) for rank in range(4)])
    assert (
        not problem.fatal
        and "parallel.tensor_model_parallel_size 4 is more than the 2 ranks of a node"
        in problem.line
    )


def test_facts_survive_json():
    of_rank = TypeAdapter(Facts)
    assert of_rank.validate_json(of_rank.dump_json(healthy(1))) == healthy(1)
    assert next(summary([healthy(rank) for rank in range(4)])).startswith(
        "hop 1: 1,000.0 to 1,000.0 MB/s, 100 us; slowest from rank 3 (n2)"
    )


def measured(group, cp, limit):
    import torch.distributed as dist

    return measure(context_groups(1, cp, 4), dist.get_rank(group), "cpu", limit)


@pytest.mark.parametrize(("cp", "hops"), [(4, 3), (2, 1)])
def test_all_links_are_measured(pool, cp, hops):
    """Each rank measures its hops and what it receives from every other rank."""
    for rank, (of_ring, pairs) in enumerate(pool.run(measured, 4, cp, 60.0)):
        assert [link.hop for link in of_ring] == list(range(1, hops + 1))
        assert {link.sender // cp for link in of_ring} == {rank // cp}, (
            "hops are those of the rank's own group"
        )
        assert sorted(link.sender for link in pairs) == [
            other for other in range(4) if other != rank
        ]
        assert all(
            link.receiver == rank and link.rate > 0 and link.latency > 0
            for link in [*of_ring, *pairs]
        )


def test_no_round_begins_when_the_time_is_over(pool):
    assert pool.run(measured, 4, 4, 0.0) == [([], [])] * 4


def test_the_file_of_links(tmp_path):
    """Timing reads from it what is possible, `cp-ring plan --rates` what to predict with."""
    pairs = [[LinkSpeed(0, other, rank, 1e8 if other // 2 != rank // 2 else 1e9, 2e-5) for other in range(4) if other != rank]
             for rank in range(4)]  # fmt: skip
    ring = [
        [LinkSpeed(1, (rank - 1) % 4, rank, (4e8 if rank % 2 == 0 else 2e9), 1e-4)]
        for rank in range(4)
    ]
    speeds = [
        {"tflops": 0.1 + rank, "memory_gb_s": 8.0 - rank, "call_us": 3.0 + rank, "kernel": "Cpu"}
        for rank in range(4)
    ]
    ranks = [
        healthy(rank, links=ring[rank], pairs=pairs[rank], speeds=speeds[rank]) for rank in range(4)
    ]
    (line,) = write_links(tmp_path, ranks)
    path = tmp_path / links.FILE
    assert line.endswith(f"cp-ring plan --rates {path}") and list(tmp_path.iterdir()) == [path]
    found = json.loads(path.read_text())
    assert (
        found["gb_s"][0] == [None, 1.0, 0.1, 0.1]
        and found["latency_us"][3][2] == 20.0
        and found["hosts"][3] == "n2"
    )
    assert found["pairs"][BETWEEN] == {
        "links": 8,
        "gb_s": 0.1,
        "slowest_gb_s": 0.1,
        "fastest_gb_s": 0.1,
        "latency_us": 20.0,
    }
    assert found["ring"][INSIDE]["gb_s"] == 2.0 and found["ring"][BETWEEN]["links"] == 2
    assert links.possible(str(tmp_path)) == {INSIDE: 2e9, BETWEEN: 4e8} and links.possible("") == {}
    assert rates.read(str(path)) == Rates(1e11, 1e9, 1e8, memory=5e9, call=6e-6), (
        "of the slowest rank and the slowest links"
    )
    words = shlex.split("plan --cp 4 --seq-length 4096 --json")
    slow, given = (
        json.loads(CliRunner().invoke(app, [*words, "--rates", str(path), *more]).stdout)
        for more in ([], ["--tflops", "0.2"])
    )
    assert slow["predicted"]["forward_s"] > given["predicted"]["forward_s"] > 0
    assert "links between nodes: 8 measured, 100.0 to 100.0 MB/s, 20 us" in list(summary(ranks))
    others = [healthy(rank) for rank in (1, 2, 3)]
    assert "3 of 12 links were measured in the time that preflight has" in list(
        summary([ranks[0], *others])
    )


def test_where_no_link_was_measured_no_file_is_written(tmp_path):
    assert (
        list(write_links(tmp_path, [healthy(0, links=[])])) == []
        and links.possible(str(tmp_path)) == {}
    )
    (line,) = write_links(tmp_path / "none", [healthy(rank) for rank in range(4)])
    assert line.startswith("warning: ") and line.endswith(
        "links.json cannot be written: No such file or directory"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not valid JSON"),
        ("[1]", "it has none of tflops, link_gb_s"),
        ('{"link_gb_s": null}', "it has none of tflops, link_gb_s"),
        ('{"tflops": "fast"}', "tflops 'fast': it must be a number above 0"),
        ('{"call_us": 0}', "call_us 0: it must be a number above 0"),
    ],
)
def test_a_file_without_rates_is_rejected_in_a_line(tmp_path, text, reason):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=rf"--rates \S+rates.json: {re.escape(reason)}"):
        rates.read(str(path))
    path.write_text('{"network_gb_s": 2.5}')
    assert rates.read(str(path)) == dataclasses.replace(RATES, between=2.5e9)


def test_prediction_follows_the_slower_of_link_and_arithmetic(job):
    def waits(flops, inside, between, per_node):
        made = attention_plan.predict(job, Rates(flops, inside, between), per_node)
        return made.exposed_forward / made.forward

    assert waits(1e9, 1e15, 1e15, 2) < 0.01 and waits(1e15, 1e4, 1e4, 2) > 0.99
    # Links between nodes only matter where the ring crosses nodes, those inside where ranks share
    # one.
    assert waits(1e9, 1e15, 1, 4) < 0.01 < 0.99 < waits(1e9, 1e15, 1, 2)
    assert waits(1e9, 1, 1e15, 1) < 0.01 < 0.99 < waits(1e9, 1, 1e15, 2)


@pytest.fixture
def alone(tmp_path, monkeypatch, capsys):
    """Runs preflight for one rank, in this process; returns its exit code, stdout and stderr."""

    def run(*overrides, **environment):
        path = tmp_path / "job.yaml"
        path.write_text(
            yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
        )
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return preflight.main(str(path), list(overrides)), *capsys.readouterr()

    return run


def test_alone_it_checks_this_host(alone, tmp_path):
    code, out, err = alone()
    assert code == 0, err
    assert re.search(r"cp_ring: preflight: 1 rank on 1 host: may train", out)
    blocked = tmp_path / "file"
    blocked.touch()
    code, out, _ = alone(f"launch.run_dir={blocked}")
    assert code == 2 and "cp_ring: preflight: error: launch.run_dir cannot be written on " in out


def test_ranks_without_an_address_are_rejected_in_a_line(alone):
    code, _, err = alone(SLURM_NTASKS="2", SLURM_PROCID="1")
    assert (
        code == 2
        and err.startswith("cp_ring: preflight: error: cp-ring preflight: 2 ranks need")
        and err.count("\n") == 1
    )


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that knows the hosts of n[7-8], and a task's variables without a launcher's."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "scontrol"
    script.write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames n[7-8]' ] || exit 1\necho n7\necho n8\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)


TASK = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "24017"}
NODES = "SLURM_STEP_NODELIST"


@pytest.mark.parametrize(
    ("given", "address", "port"),
    [
        ({}, "n7", 20017),
        ({"SLURM_RESTART_COUNT": "2"}, "n7", 20019),
        ({"MASTER_PORT": "4000"}, "n7", 4000),
        ({"MASTER_ADDR": "elsewhere"}, "elsewhere", 20017),
    ],
)
def test_a_task_of_srun_needs_no_further_variable(scontrol, monkeypatch, given, address, port):
    for name, value in {NODES: "n[7-8]", **given}.items():
        monkeypatch.setenv(name, value)
    assert World.find() == World(3, 4, 1, address, port)


@pytest.mark.parametrize("given", [{}, {NODES: "unknown"}, {"MASTER_ADDR": "n7"}])
def test_what_is_no_task_of_srun_is_rejected(scontrol, monkeypatch, given):
    """Among them the shell of a batch script, which has the number of ranks but is none of them."""
    for name, value in {"SLURM_JOB_NODELIST": "n[7-8]", **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="4 ranks need MASTER_ADDR and MASTER_PORT"):
        World.find()


def test_the_port_is_that_of_the_batch_script(scontrol, monkeypatch):
    import cp_ring.launch

    (folder,) = cp_ring.launch.__path__
    (expression,) = re.findall(
        r"MASTER_PORT=(\S+ \+ .*\)\)) #", (Path(folder) / "slurm" / "train.sbatch").read_text()
    )
    said = subprocess.check_output(
        ["bash", "-c", f"try=$SLURM_RESTART_COUNT; echo {expression}"], text=True
    )
    monkeypatch.setenv(NODES, "n[7-8]")
    assert World.find().port == int(said or 0) == 20017


def test_port_in_use_is_rejected(alone):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = alone(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert code == 2 and f"cp_ring: preflight: error: port {port} of 127.0.0.1 is in use" in err, (
        err
    )


@pytest.mark.ci
def test_where_ranks_cannot_meet_links_are_not_measured_and_the_reason_is_printed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
    )
    line = [sys.executable, "-m", "cp_ring.tools", "preflight", str(path)]
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            line,
            env=os.environ
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = ranks[0].communicate(timeout=LIMIT_S)[0]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "error: n0: GLOO_SOCKET_IFNAME is lo" in output and "hop 1" not in output, output
