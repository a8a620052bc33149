"""Runs the campaign; exit code 1 unless every fault is stopped and every right job passes."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.certificate import doors
from tests.certificate.jobs import DOCUMENTED, FAULTY, right_job
from tests.megatron import conversations
from tests.megatron.launch import fork

SCRIPT = "pretrain_gpt.py"


def examine(job, script, folder, fault="", seed=1, through=False):
    """What the certificate of `job` finds with this fault, in processes of its own; {"fault",
    "error"} where the job does not get there. `through`: up to the first microbatch, also where a
    probe before it fails.
    """
    path = str(Path(script).with_name(job.script)) if job.script else script
    argv = job.argv()
    if "--sft" in argv:  # Megatron's rows have the conversations of a line
        argv = [word for word in argv if word != "--mock-data"]
        argv += [*conversations.data(folder, most=40, each=4), "--eval-iters", "0"]
    entry = {
        "name": job.name,
        "argv": argv,
        "script": path if job.by_script else "",
        "step": job.step,
        "fault": fault,
        "seed": seed,
        "through": through,
        "skew": job.skew,
    }
    log, result = folder / f"{job.name}.log", folder / f"{job.name}.json"
    for left in (log, result):
        left.unlink(missing_ok=True)
    code = fork(job.ranks, (entry, folder, log), target=doors.rank)
    if code not in (0, doors.STOPPED) or not result.exists():
        return {"fault": fault, "error": f"exit code {code}: {log.read_text()[-6000:]}"}
    return json.loads(result.read_text())


def faults(jobs, script, folder):
    """Each fault of the jobs: {"door", "job", "fault", "stopped", "how"}."""
    entries = []
    for job in jobs:
        for fault in job.faults:
            found = examine(job, script, folder, fault)
            stopped = bool(found.get("rejections"))
            lines = found.get("rejections") or [found.get("error") or found["failure"]]
            entries.append(
                {
                    "door": _door(job),
                    "job": job.name,
                    "fault": fault,
                    "stopped": stopped,
                    "how": lines[0] or "the certificate passes",
                }
            )
        missed = [e["fault"] for e in entries if e["job"] == job.name and not e["stopped"]]
        stopped = f"{len(job.faults) - len(missed)} of {len(job.faults)} faults stopped"
        _tell(f"{job.name}: {stopped}{''.join(f'; missed: {fault}' for fault in missed)}")
    return entries


def right(jobs, script, folder):
    """Each right job: {"door", "job", "flags", "passed", "why", "not_covered"}."""
    entries = []
    for job in jobs:
        found = examine(job, script, folder)
        why = found.get("error") or "; ".join(found["rejections"]) or found["failure"]
        entries.append(
            {
                "door": _door(job),
                "job": job.name,
                "flags": job.flags,
                "passed": not why,
                "why": why,
                "not_covered": found.get("not_covered", []),
            }
        )
        _tell(f"{job.name}: {'passes' if not why else f'does not pass: {why}'}")
    return entries


def _door(job):
    return "script" if job.by_script else "own"


def _tell(line):
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.certificate", description=__doc__)
    parser.add_argument(
        "--megatron-lm",
        default="",
        help=f"a checkout of Megatron-LM, whose {SCRIPT} is the second door",
    )
    parser.add_argument(
        "--right",
        type=int,
        default=200,
        help="right jobs of random flags, beside those of the documentation's",
    )
    parser.add_argument(
        "--faulty",
        nargs="*",
        default=[job.name for job in FAULTY],
        help="jobs whose faults are planted",
    )
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if not given.megatron_lm:
        _tell("the door of Megatron-LM's script is left out: give --megatron-lm")
    jobs = [
        job
        for job in FAULTY
        if job.name in given.faulty and (given.megatron_lm or not job.by_script)
    ]
    script = str(Path(given.megatron_lm) / SCRIPT)
    with tempfile.TemporaryDirectory(prefix="cp_ring-certificate-") as folder:
        planted = faults(jobs, script, Path(folder))
        random = (right_job(number, bool(given.megatron_lm)) for number in range(given.right))
        documented = [job for job in DOCUMENTED if given.megatron_lm or not job.by_script]
        jobs = [*documented, *random]
        passed = right(jobs, script, Path(folder))
    bad = [each for each in planted + passed if not each.get("stopped", each.get("passed"))]
    for entry in bad:
        print(entry)
    for door in ("own", "script"):
        mine, good = ([e for e in entries if e["door"] == door] for entries in (planted, passed))
        stopped, passing = sum(e["stopped"] for e in mine), sum(e["passed"] for e in good)
        rights = f"{passing} of {len(good)} right jobs pass"
        print(f"{door}: {stopped} of {len(mine)} faults stopped, {rights}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
