"""The certificate in checkouts of Megatron-LM: each of their `pretrain_gpt.py` with each model
under each split.

`python -m tests.certificate.checkouts CHECKOUT...` prints a table, and exits with 1 if a job does
not pass or a part of one is not covered. Each checkout's own megatron.core and megatron.training
run, so that each has a process of its own. A checkout must have built its data set helpers (`make`
in megatron/core/datasets).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.certificate.jobs import CONVERSATIONS, HETEROGENEOUS, HYBRID, OF_HYBRID, Job
from tests.parity.models import EXPERTS, QWEN, SPARSE, UNTIED

ROOT = Path(__file__).parents[2]
SPLITS = {
    "cp2": (2, "--context-parallel-size 2"),
    "cp4": (4, "--context-parallel-size 4"),
    "tp2cp2": (4, "--context-parallel-size 2 --tensor-model-parallel-size 2"),
}
MODELS = {
    "plain": UNTIED,
    "mtp": f"{UNTIED} --mtp-num-layers 1",
    "moe": EXPERTS,
    "window": f"{UNTIED} --window-size 5,0 --window-attn-skip-freq 2",
    "hybrid": HYBRID,
    "heterogeneous": HETEROGENEOUS,
    "qwen3-next": QWEN,
    "sparse": SPARSE,
    "sparse-gathered": f"{SPARSE} --cp-comm-type all_gather",
    "sparse-sft": f"{SPARSE} --cp-comm-type all_gather {CONVERSATIONS}",
    "sft": f"{UNTIED} {CONVERSATIONS}",
    "sft-balanced": f"{UNTIED} {CONVERSATIONS} --cp-ring-layout balanced",
}

# what the certificate never covers of a model
KNOWN = {
    "relu of sparse attention's scores, in the loss",
    "the kinds of heterogeneous blocks, in the loss",
}
# of conversations and a script that loses the documents of its rows, as the branch dev's does
OWN_ENTRY = "run cp_ring.pretrain_gpt in place of it"
LOSES = "get_thd_batch_on_this_cp_rank"
# Megatron's norms need whole rows
EXPERTS_ON_TP = "--num-layers 1 --sequence-parallel --spec tests.certificate.specs experts"


def job(model, split):
    """The job of this model under this split, through the script."""
    ranks, sizes = SPLITS[split]
    more = EXPERTS_ON_TP if model == "moe" and "tensor" in sizes else ""
    flags = f"{MODELS[model]} {sizes} {more} --calculate-per-token-loss"
    return Job(
        f"{model}-{split}",
        ranks,
        flags,
        by_script=True,
        script=OF_HYBRID if model == "hybrid" else "",
    )


def examine_here(checkout, models, splits):
    """The entries of a checkout, whose Megatron is the one of this process."""
    from tests.certificate import __main__ as campaign

    jobs = [job(model, split) for model in models for split in splits]
    with tempfile.TemporaryDirectory(prefix="cp_ring-checkouts-") as folder:
        return campaign.right(jobs, str(Path(checkout) / campaign.SCRIPT), Path(folder))


def examine(checkout, models, splits):
    """The entries of a checkout: {"job", "passed", "why", "not_covered"}, from a process with its
    Megatron.
    """
    path = os.pathsep.join([str(Path(checkout).resolve()), str(ROOT)])
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "tests.certificate.checkouts", "--json", checkout]
    command += ["--models", *models, "--splits", *splits]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def version_of(checkout):
    """The version of megatron.core in a checkout."""
    from cp_ring.megatron.compat import _read_version

    return _read_version(str(Path(checkout) / "megatron" / "core" / "package_info.py"))


def cell(entry):
    """What became of a job, in a few words."""
    lines = entry["why"].strip().splitlines() or [""]
    if OWN_ENTRY in entry["why"]:
        return f"rejected: {OWN_ENTRY}"
    if not entry["passed"]:
        return f"fails: {lines[-1][:160]}"
    return (
        "covered" if not entry["not_covered"] else "not covered: " + ", ".join(entry["not_covered"])
    )


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.certificate.checkouts", description=__doc__
    )
    parser.add_argument(
        "checkouts", nargs="+", help="folders with Megatron-LM's pretrain_gpt.py and megatron/"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument(
        "--json", action="store_true", help="of one checkout, in this process: print its entries"
    )
    given = parser.parse_args()
    if given.json:
        print(json.dumps(examine_here(given.checkouts[0], given.models, given.splits)))
        return 0
    bad = 0
    for checkout in given.checkouts:
        version = version_of(checkout)
        loses = LOSES in (Path(checkout) / "pretrain_gpt.py").read_text()
        old = version.startswith("0.18")  # has no flags for them
        models = [name for name in given.models if not (old and name.startswith("sparse"))]
        for entry in examine(checkout, models, given.splits):
            shown = cell(entry)
            rejected = loses and "sft" in entry["job"] and OWN_ENTRY in entry["why"]
            bad += not (entry["passed"] or rejected) or not KNOWN.issuperset(entry["not_covered"])
            print(f"{version}  {entry['job']:20}  {shown}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
