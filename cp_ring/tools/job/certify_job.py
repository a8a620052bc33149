"""Makes the certificate of a job on its ranks, without training."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.tools.job import command_line as commands
from cp_ring.tools.job import corpus as corpora
from cp_ring.tools.job import job_config as configs
from cp_ring.tools.job.launch import launch
from cp_ring.tools.job.train import open_output


def certify(
    source: str, overrides: Sequence[str] = (), verbose: bool = False
) -> tuple[int, dict[str, Any] | None]:
    """Certifies the job of a YAML file or packaged name; returns the exit code and the certificate.

    The exit code is 0 if all probes passed, and 2 if the job is rejected.

    verbose: print all output of the ranks, which is otherwise only in a log file.
    Raises `ConfigError` for a job that cannot run, or that does not use ring attention.
    """
    job = configs.load(source, overrides)
    if not job.cp_ring.enabled:
        raise ConfigError(
            f"{source}: cp_ring.enabled is false: without ring attention there is nothing to "
            "certify"
        )
    # nothing is logged
    job = job.model_copy(update={"megatron": job.megatron | {"tensorboard_dir": None}})
    command = commands.build_command(job)
    if command.corpus is not None:
        corpora.build(command.corpus)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "certificate.json"
        entry = ("cp_ring.tools.job.certify_ranks", str(report))
        code = launch(
            dataclasses.replace(command, entry=entry), open_output(job, "certify", verbose)
        )
        return code, json.loads(report.read_text()) if report.is_file() else None
