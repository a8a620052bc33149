"""One rank of a job that comes through a door as far as its certificate, which examines it in each
of its cases.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.certificate.faults import planted

STOPPED = 3


def run(job: dict[str, Any], folder: Path) -> None:
    """Job {"name", "argv", "script", "cases": [(fault, seed)], "seconds"}: script is "" for
    cp_ring's own entry.

    FOLDER/name.json gets a list of {"fault", "seed", "rejections", "failure", "not_covered",
    "seconds"}, which ends with the first case that ends the job (exit code `STOPPED`).
    """
    import torch.distributed as dist

    from cp_ring import pretrain_gpt
    from cp_ring import run as scripts
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.megatron.certificate import certify as module
    from tests.megatron import worker

    def examine(args: Any, step: Any = None) -> None:
        found = []
        for fault, seed in job["cases"]:
            entry = {"fault": fault, "seed": seed, "failure": "", "not_covered": []}
            with planted(fault, step):
                try:
                    certificate = module.run_probes(args, seed, step, job["seconds"])
                except (
                    ConfigError,
                    KernelError,
                    PlanError,
                ) as error:  # which other ranks may wait for
                    write([*found, entry | {"rejections": [str(error)]}])
                    os._exit(STOPPED)
            entry["rejections"] = [probe.rejection() for probe in certificate.failures]
            entry |= {"failure": certificate.failure, "not_covered": certificate.not_covered}
            found.append(entry | {"seconds": certificate.seconds})
        if os.environ["RANK"] == "0":
            write(found)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)

    def write(found: list[dict[str, Any]]) -> None:
        path = folder / f"{job['name']}.{os.environ['RANK']}"
        path.write_text(json.dumps(found))
        path.replace(folder / f"{job['name']}.json")

    worker.import_stand_ins(job["argv"])
    module.certify = examine  # which the patch `certificate` looks up
    try:
        if job["script"]:
            sys.argv = ["cp_ring.run", job["script"], *job["argv"]]
            scripts.main()
        else:
            sys.argv = ["pretrain_gpt", *job["argv"]]
            pretrain_gpt.main()
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            sys.stdout.flush()
        os._exit(1)


def rank(number: int, ranks: int, port: int, job: dict[str, Any], folder: Path, log: Path) -> None:
    """As `tests.megatron.worker.rank`, for a job of this module."""
    from tests.megatron import worker

    worker.certificate_worker.run = run
    worker.rank(number, ranks, port, job, folder, log)
