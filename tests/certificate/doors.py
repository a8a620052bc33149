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

import torch

from tests.certificate.faults import planted

STOPPED = 3


def states():
    """Everything that a certificate must leave as it was."""
    import random

    import numpy as np
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from cp_ring.megatron import settings

    tracker = {
        name: state.tolist()
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
    }
    groups = {
        name: id(value)
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }
    return (
        torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), tracker, dict(vars(get_args())),
        id(get_args()), groups, get_num_microbatches(), settings.current(), losses_of_experts(),
    )  # fmt: skip


def losses_of_experts():
    """What Megatron has collected for its log, since 0.18."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    tracker = logging and logging._MOE_METRICS_TRACKER
    return tracker and list(tracker.metrics)


def run(job, folder):
    """Job {"name", "argv", "script", "step", "cases": [(fault, seed)], "seconds", "skew"}: script is
    "" for cp_ring's own entry; seconds are those for probes at the job's length.

    FOLDER/name.json gets a list of {"fault", "seed", "rejections", "failure", "not_covered",
    "untouched"} with the certificate, which ends with the first case that ends the job (exit code
    `STOPPED`); "untouched" tells whether all states and arguments are as before.
    """
    import torch.distributed as dist

    from cp_ring import pretrain_gpt
    from cp_ring import run as scripts
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.megatron.certificate import certify as module
    from tests.megatron import worker

    def examine(args, step=None):
        from tests.megatron import certificate_steps  # imports Megatron

        step = getattr(certificate_steps, job["step"]) if job["step"] else step
        found = []
        for fault, seed in job["cases"]:
            entry = {"fault": fault, "seed": seed, "failure": "", "not_covered": []}
            before, misread = states(), certificate_steps.MISREAD.get(fault)
            with planted("" if misread else fault, step):
                try:
                    certificate = module.run_probes(args, seed, misread or step, job["seconds"])
                except (
                    ConfigError,
                    KernelError,
                    PlanError,
                ) as error:  # which other ranks may wait for
                    write([*found, entry | {"rejections": [str(error)]}])
                    os._exit(STOPPED)
            entry["rejections"] = [probe.rejection() for probe in certificate.failures]
            entry |= {"failure": certificate.failure, "not_covered": certificate.not_covered}
            found.append(entry | certificate.as_dict() | {"untouched": states() == before})
        if os.environ["RANK"] == "0":
            write(found)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)

    def write(found):
        path = folder / f"{job['name']}.{os.environ['RANK']}"
        path.write_text(json.dumps(found))
        path.replace(folder / f"{job['name']}.json")

    worker.import_stand_ins(job["argv"])
    module.certify = examine  # which the patch `certificate` looks up
    module.SKEW_S = job["skew"]
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


def rank(number, ranks, port, job, folder, log):
    """As `tests.megatron.worker.rank`, for a job of this module."""
    from tests.megatron import worker

    worker.rank(number, ranks, port, job, folder, log, run)
