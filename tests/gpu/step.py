"""One step of the GPU checks in this process:
`python -m tests.gpu.step NAME DEVICE RESULTS SECONDS [NCCL]`.

Exits with 1 if a check does not hold, and after an error, which is appended to the results.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
from functools import partial

from tests.gpu.job import Job
from tests.gpu.run import STEPS


def run(name: str, device: str, results: str, nccl: str = "") -> bool:
    """Whether all checks of the step hold."""
    job = Job(name, device, results)
    for home in STEPS[name].functions:
        module, _, function = home.partition(":")
        if not job.values and module == "training":
            job.row(skipped=home, why="Megatron's training reads values of the device")
            continue
        work = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
        try:
            (partial(work, nccl=nccl) if function == "processes" else work)(job)
        except Exception:
            job.failed = True
            job.row(check=f"{function} failed", holds=False, error=traceback.format_exc()[-3000:])
    return not job.failed


if __name__ == "__main__":
    name, device, results, seconds, *nccl = sys.argv[1:]
    faulthandler.dump_traceback_later(0.9 * float(seconds))  # says where a step hangs
    sys.exit(0 if run(name, device, results, *nccl) else 1)
