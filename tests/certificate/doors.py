"""One rank of a job that comes through a door as far as its certificate, which examines it with one
fault: ranks are processes of their own, so that no other fault has left anything in a cache.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from tests.certificate import process_state
from tests.certificate.faults import planted

STOPPED = 3


class Lines(list):
    """The messages of each line of a file, as Megatron reads them with the library `datasets`."""

    def __init__(self, path):
        super().__init__(
            json.loads(line)["messages"] for line in Path(path).read_text().splitlines()
        )


def run(job, folder):
    """Job {"name", "argv", "script", "step", "fault", "seed", "through", "skew"}: script is "" for
    cp_ring's own entry.

    FOLDER/name.json gets {"fault", "seed", "rejections", "failure", "not_covered", "changed"} with
    the certificate, which ends with an error that ends the job (exit code `STOPPED`); "changed" has
    the states of the process that are not as before.
    """
    import torch.distributed as dist
    from megatron.training.datasets import sft_dataset

    from cp_ring import pretrain_gpt
    from cp_ring import run as scripts
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.megatron.certificate import certify as module
    from tests.megatron import worker

    entry = {"fault": job["fault"], "seed": job["seed"], "failure": "", "not_covered": []}
    entry |= {"rejections": [], "probes": [], "changed": {}}

    def examine(args, step=None, before=None, iterators=None):
        from tests.megatron import certificate_steps  # imports Megatron

        step = getattr(certificate_steps, job["step"]) if job["step"] else step
        misread = certificate_steps.MISREAD.get(job["fault"])
        state = process_state.whole()
        with planted("" if misread else job["fault"], step):
            try:
                items = module.take(iterators) if before else None
                certificate = module.run_probes(args, job["seed"], misread or step, items)
            except (ConfigError, KernelError, PlanError) as error:  # which others may wait for
                write(entry | {"rejections": [*entry["rejections"], str(error)]})
                os._exit(STOPPED)
        entry["rejections"] += [probe.rejection() for probe in certificate.failures]
        gaps = certificate.not_covered
        failure = next((gap[10:-1] for gap in gaps if gap.startswith("the loss (")), "")
        entry["failure"] = entry["failure"] or failure
        entry["not_covered"] += [gap for gap in gaps if gap not in entry["not_covered"]]
        entry["changed"] |= process_state.changes(state, process_state.whole())
        entry["probes"] += [asdict(probe) for probe in certificate.probes]
        if os.environ["RANK"] == "0":
            write(asdict(certificate) | entry)
        # a right job gets as far as its first step
        if before or (entry["rejections"] and not job["through"]):
            finish()
        return entry

    def finish(*args, **kwargs):
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)

    def write(found):
        path = folder / f"{job['name']}.{os.environ['RANK']}"
        path.write_text(json.dumps(found))
        path.replace(folder / f"{job['name']}.json")

    worker.import_stand_ins(job["argv"])
    sft_dataset.SFTLowLevelDataset = Lines
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
