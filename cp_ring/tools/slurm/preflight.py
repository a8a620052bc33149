"""`cp-ring preflight`: before training, all ranks report facts and measure their links. Rank 0
decides whether to train.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import os
import platform
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cp_ring.errors import ConfigError, KernelError
from cp_ring.observe.links import slowest
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.tools.job import command_line as commands
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.job.doctor import output_of, version_of
from cp_ring.tools.slurm import attention_plan
from cp_ring.tools.slurm.placement import Placement
from cp_ring.tools.slurm.preflight_checks import Facts, Problem, judge, summary
from cp_ring.tools.slurm.preflight_links import TIMEOUT_S, measure_links, write_links

_PACKAGES = ("torch", "megatron-core", "cp-ring", "numpy")


@dataclasses.dataclass(frozen=True)
class World:
    """This rank among all ranks, from the variables of torchrun or of a Slurm task. Without them it
    is the only rank.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def find(cls) -> World:
        rank = _variable(("RANK", "SLURM_PROCID"), 0)
        size = _variable(("WORLD_SIZE", "SLURM_NTASKS"), 1)
        local = _variable(("LOCAL_RANK", "SLURM_LOCALID"), 0)
        if rank >= size:
            raise ConfigError(
                f"cp-ring preflight: rank {rank} (RANK) is not a rank of {size} ranks (WORLD_SIZE)"
            )
        address = os.environ.get("MASTER_ADDR")
        port = _variable(("MASTER_PORT",), 0)
        nodes = os.environ.get("SLURM_STEP_NODELIST")
        if size > 1 and nodes is not None:  # a task of srun; the shell of a batch script is no rank
            address, port = address or _first_host(nodes), port or _slurm_port()
        if size > 1 and not (address and port):
            raise ConfigError(
                f"cp-ring preflight: {size} ranks need MASTER_ADDR and MASTER_PORT, the host of "
                "rank 0 and a free port there: start all ranks with srun or torchrun"
            )
        return cls(rank, size, local, address or "127.0.0.1", port)


def _variable(names: tuple[str, ...], default: int) -> int:
    """The number in the first of the environment variables that has a value."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return default
    if not os.environ[name].isdecimal():
        raise ConfigError(
            f"cp-ring preflight: environment variable {name}={os.environ[name]} is not a whole "
            "number of at least 0"
        )
    return int(os.environ[name])


def _first_host(nodes: str) -> str:
    """The first host of a list in Slurm's short form, n[1-4]; "" if scontrol does not answer."""
    return next(iter(output_of("scontrol", "show", "hostnames", nodes).split()), "")


def _slurm_port() -> int:
    """The port that launch/slurm/train.sbatch uses for this attempt of the job."""
    number, restarts = (_variable((name,), 0) for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    return 20000 + (number + restarts) % 12000


_TOKEN = ".preflight"
"""A file of rank 0 in the run directory, which all ranks must see while preflight runs."""


def preflight(source: str, overrides: list[str]) -> int:
    """Checks the job on all ranks: 0, or 2 if it must not train. Raises `ConfigError`."""
    job = configs.load(source, overrides)
    world = World.find()
    began = time.monotonic()
    store = _make_store(world)
    facts = _gather_facts(job, source, world, store)
    if world.size > 1 and _can_measure_links(job, world, store, facts):
        measure_links(job, world.size, store, facts)
    if ranks := _facts_of_all("facts", facts, world, store):
        problems = judge(job, ranks)
        for line in [*report(job, ranks, problems), *write_links(commands.run_dir(job), ranks)]:
            print(f"cp_ring: preflight: {line}", flush=True)
        print(f"cp_ring: preflight: {time.monotonic() - began:.1f} s", flush=True)
        store.set("verdict", "2" if any(problem.fatal for problem in problems) else "0")
    code = int(store.get("verdict"))
    store.add("left", 1)
    if world.rank == 0:  # the store lives in this process
        with contextlib.suppress(OSError):
            (commands.run_dir(job) / _TOKEN).unlink()
        while store.add("left", 0) < world.size:
            time.sleep(0.05)
    return code


def _can_measure_links(job: configs.JobConfig, world: World, store: Any, facts: Facts) -> bool:
    """Whether links can be measured. With a fatal problem (no GPU, a host name for loopback), ranks
    would wait forever.
    """
    if seen := _facts_of_all("seen", facts, world, store):
        store.set("sound", "" if any(problem.fatal for problem in judge(job, seen)) else "yes")
    return bool(store.get("sound"))


def _facts_of_all(name: str, facts: Facts, world: World, store: Any) -> list[Facts]:
    """Sends the facts of this rank to rank 0, which gets those of all ranks, and others none."""
    of_rank = TypeAdapter(Facts)
    store.set(f"{name}/{world.rank}", of_rank.dump_json(facts))
    if world.rank:
        return []
    return [of_rank.validate_json(store.get(f"{name}/{rank}")) for rank in range(world.size)]


def report(job: configs.JobConfig, ranks: list[Facts], problems: list[Problem]) -> list[str]:
    """The lines to print: problems, placement, links, prediction."""
    lines = [("error: " if problem.fatal else "warning: ") + problem.line for problem in problems]
    hosts = list(dict.fromkeys(facts.host for facts in ranks))
    fits = not any(problem.fatal for problem in problems)
    if fits and len(ranks) > 1:
        lines += attention_plan.describe_job(job, Placement(tuple(hosts), len(ranks) // len(hosts)))
    lines += summary(ranks)
    measured = slowest(
        [facts.host for facts in ranks], [link for facts in ranks for link in facts.links]
    )
    if fits and measured and job.parallel.context_parallel_size > 1:
        rates = Rates(
            min(1e12 * facts.speeds["tflops"] if facts.speeds else facts.flops for facts in ranks),
            *measured,
        )
        times = attention_plan.predict(job, rates, len(ranks) // len(hosts))
        share = times.exposed_forward / times.forward
        lines.append(
            f"predicted at these speeds: {share:.0%} of the forward attention of a layer is spent "
            "waiting for transfers"
        )
    alone = "; to measure links, run this on all ranks: srun cp-ring preflight ..."
    lines.append(
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}: "
        f"{'may train' if fits else 'must not train'}{alone * (len(ranks) == 1)}"
    )
    return lines


def _make_store(world: World) -> Any:
    """A store on rank 0's host, at the port that training will use. Raises `ConfigError` if the
    port is in use.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=TIMEOUT_S)
    if world.size == 1:
        return dist.HashStore()
    try:
        return dist.TCPStore(
            world.address,
            world.port,
            world.size,
            world.rank == 0,
            timeout=limit,
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
        what = "is in use" if world.rank == 0 else "cannot be reached"
        raise ConfigError(
            f"port {world.port} of {world.address} {what}, from rank {world.rank}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _gather_facts(job: configs.JobConfig, source: str, world: World, store: Any) -> Facts:
    run_dir = commands.run_dir(job)
    writable = _write_probe(run_dir, world)
    token = run_dir / _TOKEN
    if world.rank == 0 and not writable:
        token.write_text(f"{os.getpid()} {time.time()}")
        store.set("token", token.read_text())
    elif world.rank == 0:
        store.set("token", "")
    expected = store.get("token").decode()
    store.add("clock", 1)
    while int(store.add("clock", 0)) < world.size:  # so that all read their clocks at the same time
        time.sleep(0.01)
    clock = time.time()
    shared = bool(expected) and token.is_file() and token.read_text() == expected
    facts = Facts(
        rank=world.rank,
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        address=_address(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        config_hash=hashlib.sha256(configs.find(source).read_bytes()).hexdigest(),
        versions=_versions(),
        clock=clock,
        writable=writable,
        shared=shared,
        free=0 if writable else shutil.disk_usage(run_dir).free,
        flops=0.0,
        gpu=_gpu_facts(job, world.local_rank),
    )
    gpu = bool(facts.gpu)
    facts.flops, facts.missing = _measure_flops(gpu), _find_missing(job, gpu)
    facts.speeds = {} if facts.missing else _measure_speeds(gpu)
    return facts


def _find_missing(job: configs.JobConfig, gpu: bool) -> list[str]:
    """What the job needs and this host lacks: a GPU for this rank, the package of the layers."""
    import torch

    from cp_ring.megatron.flags import rules
    from cp_ring.megatron.flags.rule import Job, problem

    missing = []
    if job.launch.device == "cuda" and not gpu:
        missing.append(
            f"launch.device cuda: no GPU for this rank ({torch.cuda.device_count()} GPUs here)"
        )
    if job.launch.device == "cuda" or gpu:  # on the CPU the layers are Megatron's own
        settings = argparse.Namespace(**{"transformer_impl": "transformer_engine"} | job.megatron)
        missing += filter(None, [problem(Job(settings), rules.LAYERS)])
    return missing


def _write_probe(run_dir: Path, world: World) -> str:
    """The reason why this rank cannot write into the run directory, or ""."""
    probe = run_dir / f".preflight-{world.rank}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    import torch

    versions = {"Python": platform.python_version(), "CUDA": str(torch.version.cuda)}
    return versions | {name: version_of(name) or "none" for name in _PACKAGES}


def _gpu_facts(job: configs.JobConfig, index: int) -> dict[str, Any]:
    """Facts about this rank's GPU; {} if the job uses no GPU or there is none."""
    import torch

    if job.launch.device == "cpu" or index >= torch.cuda.device_count():
        return {}
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info()
    return {
        "index": index,
        "name": torch.cuda.get_device_name(),
        "free": free,
        "total": total,
        "uncorrected_errors": _memory_errors(index),
    }


def _memory_errors(index: int) -> int:
    """Uncorrected memory errors since the driver was loaded, from nvidia-smi; 0 if it does not
    count them.
    """
    count = output_of(
        "nvidia-smi",
        f"--id={index}",
        "--query-gpu=ecc.errors.uncorrected.volatile.total",
        "--format=csv,noheader,nounits",
    )
    return int(count) if count.isdigit() else 0


def _measure_speeds(gpu: bool) -> dict[str, Any]:
    """What the attention kernel and the memory of this rank do in a second; {} where no kernel runs
    here.
    """
    import torch

    from cp_ring.tools.job import speeds

    torch.set_num_threads(1)  # as the ranks of a job have it on the CPU
    with contextlib.suppress(KernelError):  # the job says why when it starts
        return speeds.kernel_rates(torch.device("cuda" if gpu else "cpu"), repeats=2)
    return {}


def _measure_flops(gpu: bool) -> float:
    import torch

    from cp_ring.tools.job import speeds

    return speeds.product_rate(torch.device("cuda" if gpu else "cpu"))


def main(source: str, overrides: list[str]) -> int:
    """Runs `preflight`. A rejection is one line on stderr and exit code 2, on any rank, because
    each rank checks its own host.
    """
    try:
        return preflight(source, overrides)
    except ConfigError as error:
        lines = (f"cp_ring: preflight: error: {line}" for line in error.args)
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        return 2
