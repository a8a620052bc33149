"""Preflight and the order of ranks on a real Slurm: a throttled link is named, hosts follow the
topology.
"""

import pytest

from tests.tools.slurm.cluster import Job, running
from tests.tools.slurm.test_faults import CP4, QUICK, needs_cluster

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster at a time
TOPOLOGY = """SwitchName=s2 Nodes=n1,n4
SwitchName=s10 Nodes=n2,n3
SwitchName=top Switches=s2,s10"""


@pytest.mark.slow
def test_throttled_link_is_named_and_training_goes_on():
    needs_cluster()
    with running() as cluster:
        throttle = (
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "40mbit",
            "burst",
            "32kbit",
            "latency",
            "400ms",
        )
        assert cluster.run("ip", "netns", "exec", "n2", *throttle).returncode == 0
        job = Job(cluster, "throttled", *QUICK[:2], megatron__train_iters=2, **CP4)
        assert job.end() == "COMPLETED", job.logs()
        said = (job.run_dir / "logs" / f"{job.number}.0" / "rank0000-n1.log").read_text()
        assert (
            "preflight: warning: slow link n2 -> n1 (hop " in said
            and "slow link n1 -> n2" not in said
        ), said
        assert (
            "preflight: the first on n1 n1 n2 n2" in said
            and "may train" in said
            and "predicted at these speeds" in said
        )
        seconds = float(said.split(" s\n")[0].rsplit("preflight: ", 1)[1])
        assert seconds < 600  # the links are slow, not the measurement


@pytest.mark.slow
def test_ranks_follow_the_topology():
    needs_cluster()
    with running(4, TOPOLOGY=TOPOLOGY, EXTRA_CONF="TopologyPlugin=topology/tree") as cluster:
        job = Job(
            cluster,
            "placed",
            "--nodes",
            "4",
            "--ranks-per-node",
            "1",
            *QUICK,
            megatron__train_iters=2,
            **CP4,
        )
        assert job.end() == "COMPLETED", job.logs()
        hosts = (job.run_dir / "logs" / f"{job.number}.0" / "hosts").read_text().split()
        assert hosts == ["n1", "n4", "n2", "n3"]
        for rank, host in enumerate(hosts):
            assert (
                job.run_dir / "logs" / f"{job.number}.0" / f"rank{rank:04d}-{host}.log"
            ).is_file()
