"""One rank of certificates: a job of flags is examined in each of its cases, and not trained.

A job is {"name", "argv", "cases"}, a case a planted fault ("" for none) and a seed. "step" may name
a forward step of certificate_steps, and "seconds" the time for probes at the job's length.

FOLDER/name.json gets, from rank 0, a list of {"fault", "seed", "rejections", "untouched"} with the
certificate; "untouched" tells whether all states and arguments are as before.
"""

import json
import os
import sys

import torch

from tests.certificate.faults import planted


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
    from cp_ring.megatron import compat
    from cp_ring.patches.install import install
    from tests.megatron.worker import import_stand_ins

    sys.argv = ["certificate", *job["argv"]]
    import_stand_ins(job["argv"])
    install(sys.argv[1:])
    args = compat.start()
    from cp_ring.megatron.certificate import certify
    from tests.megatron import certificate_steps  # imports Megatron

    certify.SKEW_S = job.get("skew", 300.0)  # ranks that fail alike, on a machine of any speed
    step = getattr(certificate_steps, job["step"]) if job.get("step") else None
    found = []
    for fault, seed in job["cases"]:
        before = states()
        misread = certificate_steps.MISREAD.get(fault)
        with planted("" if misread else fault):
            certificate = certify.run_probes(args, seed, misread or step, job.get("seconds", 5.0))
        entry = {
            "fault": fault,
            "seed": seed,
            "rejections": [probe.rejection() for probe in certificate.failures],
        }
        entry["failure"] = certificate.failure
        found.append(entry | certificate.as_dict() | {"untouched": states() == before})
    if os.environ["RANK"] == "0":
        (folder / f"{job['name']}.json").write_text(json.dumps(found))
