"""`cp-ring submit`: writes a job's batch script, checks it and submits it to Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cp_ring.errors import ConfigError, Reasons, one_line
from cp_ring.tools.job import command_line as commands
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.job.train import prepare_corpus, record_job, say
from cp_ring.tools.slurm import attempts, attention_plan, batch_script
from cp_ring.tools.slurm.placement import Placement


@dataclass(frozen=True)
class Site:
    """How ranks are started on this cluster. With a container, `python` is that inside of it."""

    launcher: Literal["srun", "torchrun"] = "srun"
    env_file: Path | None = None
    rank_order: Path | None = None
    container_image: str | None = None
    container_mounts: str | None = None
    python: str | None = None
    preflight: bool = True

    def __post_init__(self) -> None:
        if self.launcher not in ("srun", "torchrun"):
            raise ConfigError(f"--launcher {self.launcher}: it is srun or torchrun")
        for flag, path in (("--env-file", self.env_file), ("--rank-order", self.rank_order)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{flag} {path}: no such file")
        if self.container_mounts and not self.container_image:
            raise ConfigError("--container-mounts needs --container-image")
        for mount in self.container_mounts.split(",") if self.container_mounts else []:
            if not re.fullmatch(r"[^:,]+:/[^:,]*(:[^:,]+)*", mount):
                raise ConfigError(
                    f"--container-mounts {mount!r}: expected SRC:DST with an absolute path DST"
                )
        if (
            self.python
            and "/" in self.python
            and not self.container_image
            and not os.access(self.python, os.X_OK)
        ):
            raise ConfigError(
                f"--python {self.python}: no such program; it must have the same path on all nodes"
            )

    def srun_options(self, run_dir: Path) -> list[str]:
        """Options of the pyxis plugin (enroot containers). The run directory has the same path
        inside the container.
        """
        if self.container_image is None:
            return []
        mounts = [f"{run_dir}:{run_dir}", *filter(None, [self.container_mounts])]
        return [
            f"--container-image={self.container_image}",
            f"--container-mounts={','.join(mounts)}",
            "--no-container-mount-home",
            f"--container-workdir={run_dir}",
        ]


def submit(
    source: str,
    resources: batch_script.Resources,
    site: Site,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> str | None:
    """Submits the job of a YAML file and returns Slurm's job id. With `dry_run`, prints the script
    and returns None.

    All checks come before the job is queued. Raises `ConfigError`.
    """
    job = configs.load(source, overrides)
    # ranks may start in another folder
    launch = job.launch.model_copy(update={"run_dir": commands.run_dir(job).absolute()})
    job = job.model_copy(update={"launch": launch})
    reasons = Reasons()
    with reasons.of():
        check_resources(job, resources, source)
    with reasons.of():
        _placement(resources, site)
    other = "; or give the ranks another Python with --python or --container-image"
    other_python = site.container_image or site.python  # else the ranks run this Python
    corpus, flags = commands.checked_flags(
        job,
        "cuda" if resources.gpus else "cpu",
        reasons,
        None if other_python else Reasons() if dry_run else reasons,
        other,
    )
    script, line = build_script(job, resources, site, flags)
    text = script.render((_launch_folder() / "train.sbatch").read_text())
    batch_script.lint(text)
    if dry_run:
        print(text, end="")
        plan = attention_plan.describe_job(job, _placement(resources, site))
        for shown in (*plan, shlex.join(line)):
            print(f"cp_ring: {shown}", file=sys.stderr)
        return None
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "cp-ring submit: sbatch is not installed here; run this on a login node, or train "
            "without Slurm: cp-ring train"
        )
    _reject_second(script.run_dir)
    if corpus is not None:
        prepare_corpus(corpus, job)
    names = ("job.sbatch", "env.sh", "job.yaml", "corpus.json", "logs", "")
    new = [path for path in (script.run_dir / name for name in names) if not path.exists()]
    record_job(job, corpus)
    _write_files(script, site, text)
    try:
        _run_sbatch([*line[:1], "--test-only", *line[1:]])
        number = _run_sbatch([*line[:1], "--parsable", *line[1:]]).strip().partition(";")[0]
    except ConfigError:
        for path in filter(Path.exists, new):
            path.rmdir() if path.is_dir() else path.unlink()
        raise
    attempts.append(script.run_dir, number, "submit")
    logs = f"{script.run_dir}/logs"
    say(f"job {number}; output: {logs}/job-{number}.log, of the ranks: {logs}/{number}.0/")
    run_dir = shlex.quote(str(commands.run_dir(job)))
    say(f"to watch it: cp-ring status {run_dir}; to end it: scancel {number}")
    return number


def check_resources(job: configs.JobConfig, resources: batch_script.Resources, source: str) -> None:
    """Raises `ConfigError` that names what to change, unless the job fits the nodes."""
    for key in ("nnodes", "node_rank", "master_addr", "max_restarts"):
        if getattr(job.launch, key) != type(job.launch).model_fields[key].default:
            raise ConfigError(
                f"{source}: launch.{key} is for cp-ring train: leave it out, because Slurm decides "
                "on nodes and restarts"
            )
    if job.launch.device == ("cpu" if resources.gpus else "cuda"):
        other = "--ranks-per-node" if resources.gpus else "--gpus-per-node"
        raise ConfigError(
            f"launch.device {job.launch.device}: give {other} instead of {resources.per_node_flag}"
        )
    if job.parallel.ranks == resources.ranks:
        return
    model = job.parallel.ranks // job.parallel.data_parallel_size
    asked = (
        f"--nodes {resources.nodes} x {resources.per_node_flag} {resources.ranks_per_node} = "
        f"{resources.ranks} ranks"
    )
    if resources.ranks % model:
        raise ConfigError(
            f"{asked}: not a multiple of tensor x pipeline x context parallel size in section "
            f"parallel, {model}"
        )
    raise ConfigError(
        f"{asked}, but the sizes in section parallel make {job.parallel.ranks}: "
        f"--set parallel.data_parallel_size={resources.ranks // model}"
    )


def build_script(
    job: configs.JobConfig, resources: batch_script.Resources, site: Site, flags: Sequence[str]
) -> tuple[batch_script.Script, list[str]]:
    """The job's batch script and the sbatch command that submits it."""
    run_dir = commands.run_dir(job).absolute()
    python = site.python or ("python3" if site.container_image else sys.executable)
    script = batch_script.Script(
        resources=resources,
        run_dir=run_dir,
        checkpoints=commands.checkpoints(job),
        env_file=run_dir / "env.sh",
        command=[python, "-m", commands.ENTRY, *flags],
        preflight=[python, "-m", "cp_ring.tools", "preflight", str(run_dir / "job.yaml")]
        if site.preflight
        else [],
        launcher=site.launcher,
        rank_order=site.rank_order.absolute() if site.rank_order else None,
        srun_options=site.srun_options(run_dir),
    )
    # On the command line they win over SBATCH_NO_REQUEUE and the like, which win over the script.
    return script, [
        "sbatch",
        *resources.directives(),
        f"--output={batch_script.output_pattern(run_dir / 'logs')}",
        str(run_dir / "job.sbatch"),
    ]


def _placement(resources: batch_script.Resources, site: Site) -> Placement:
    """The placement on the first hosts of --rank-order; without that option, on stand-ins for hosts
    that Slurm will choose.
    """
    hosts = [f"node{index}" for index in range(resources.nodes)]
    if site.rank_order:
        try:
            named = site.rank_order.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--rank-order {site.rank_order}: cannot read host names: {error}"
            ) from None
        if len(named) < resources.nodes:
            raise ConfigError(
                f"--rank-order {site.rank_order}: it names {len(named)} hosts for --nodes "
                f"{resources.nodes}"
            )
        hosts = named[: resources.nodes]
    return Placement(tuple(hosts), resources.ranks_per_node)


def _launch_folder() -> Path:
    import cp_ring.launch

    return Path(next(iter(cp_ring.launch.__path__))) / "slurm"


def _write_files(script: batch_script.Script, site: Site, text: str) -> None:
    """Writes the script and the environment that its ranks source; makes the folder of the log,
    because Slurm does not.
    """
    (script.run_dir / "logs").mkdir(exist_ok=True)
    (script.run_dir / "job.sbatch").write_text(text)
    shutil.copyfile(site.env_file or _launch_folder() / "env.sh", script.env_file)


def _reject_second(run_dir: Path) -> None:
    """Raises `ConfigError` if a job of this run is queued: two jobs would overwrite each other's
    checkpoints.
    """
    number = attempts.last_job(run_dir)
    state = attempts.queue_state(number) if number else None
    if state is not None:
        raise ConfigError(
            f"launch.run_dir {run_dir}: job {number} is {state.name} there; scancel it, or give "
            "another folder"
        )


def _run_sbatch(line: Sequence[str]) -> str:
    done = subprocess.run(list(line), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{shlex.join(line[:2])}: {one_line(done.stderr or done.stdout)}")
    return done.stdout
