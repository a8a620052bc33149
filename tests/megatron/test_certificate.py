"""The certificate passes right jobs, whatever the seed, and leaves no trace in the training. Planted
faults are in tests/certificate.
"""

import json
import shlex

import pytest

from tests.certificate import __main__ as campaign
from tests.certificate.jobs import HYBRID, OSS, Job
from tests.megatron.launch import attempt, trace, train
from tests.parity.models import COMMON, UNTIED

EVERY = {
    "mask", "mask of gradients", "out", "dq", "dk", "dv", "loss of each token", "loss",
    "gradients"
}  # fmt: skip

OF_PATTERN = (
    "--hybrid-override-pattern M*E-M*- --num-layers 7 --num-experts 4 --moe-router-topk 2 "
    # the second layer alone has none
    "--moe-token-dispatcher-type alltoall --window-size 5,0 --window-attn-skip-freq 2"
)

ON_FOUR = "--context-parallel-size 2 --tensor-model-parallel-size 2"
JOBS = {
    "oss": OSS,
    "documents": f"{UNTIED} --cp-ring-document-mask --mtp-num-layers 1",
    "balanced": f"{UNTIED} --cp-ring-document-mask --cp-ring-layout balanced --bf16",
    "declared": f"{UNTIED} --cp-ring-mask-kinds shared-prefix,images,global,causal",
    "declared_balanced": (
        f"{UNTIED} --cp-ring-mask-kinds tree --cp-ring-layout balanced --window-size "
        "5,0 --window-attn-skip-freq 2 --mtp-num-layers 1 --micro-batch-size 2"
    ),
    "moe": (
        f"{UNTIED} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-3 "
        "--expert-model-parallel-size 2 --bf16 --window-size 20,0 --softmax-type off-by-one "
        "--cp-ring-route ring"
    ),
    "hybrid": f"{HYBRID} {OF_PATTERN}",
    "reference": (
        "--position-embedding-type learned_absolute --cp-ring-kernel reference --cp-ring-layout "
        "contiguous --window-size 70,0"
    ),
    "cp4": f"{OSS} --bf16",
    "tp2cp2": f"{OSS} {ON_FOUR}",
    "pp2cp2": (
        f"{UNTIED} --context-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--cp-ring-document-mask"
    ),
}
QUICK = ("oss", "documents", "moe", "cp4")
IN_CI = ("declared_balanced", "hybrid", "pp2cp2")
FOUR_RANKS = ("cp4", "tp2cp2", "pp2cp2")


def examine(name, folder, seeds):
    """The certificates of a right job, one with each seed."""
    ranks = 4 if name in FOUR_RANKS else 2
    job = Job(name, ranks, f"--calculate-per-token-loss {JOBS[name]}")
    return [campaign.examine(job, "", folder, seed=seed) for seed in seeds]


def marks(name):
    return () if name in QUICK else pytest.mark.ci if name in IN_CI else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in JOBS])
def test_a_right_job_passes_with_any_seed(tmp_path, name):
    for entry in examine(name, tmp_path, (1, 2) if name == "oss" else (1,)):
        assert entry["rejections"] == [] and entry["failure"] == "", entry
        assert {probe["name"] for probe in entry["probes"]} >= EVERY
        assert entry["changed"] == {}
        assert entry["not_covered"] == ["experts of other ranks, in the loss"] * (name == "moe")


TRAINED = shlex.split(
    f"--num-layers 2 --seq-length 64 --context-parallel-size 2 --cp-ring {OSS} --hidden-dropout 0.1"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job trained with and without its certificate, and resumed with workers."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = {}
    for name, more in {"with": ["--cp-ring-certify"], "without": []}.items():
        saved = [
            "--save",
            str(folder / f"saved {name}"),
            "--save-interval",
            "2",
            "--ckpt-format",
            "torch",
        ]
        flags = [*TRAINED, *saved, *more]
        jobs[name] = [*flags, "--train-iters", "5", "--exit-interval", "3"]
        # whose sampler draws its seed when it is asked for the first batch
        cyclic = ["--num-workers", "2", "--dataloader-type", "cyclic"]
        load = ["--load", saved[1], "--ckpt-step", "2"]
        jobs[f"{name}, resumed"] = [*flags, *load, "--train-iters", "5", *cyclic]
    train(2, jobs, folder, COMMON)
    return folder


@pytest.mark.parametrize("resumed, steps", [("", [1, 2, 3]), (", resumed", [3, 4, 5])])
def test_the_training_is_the_same_to_the_last_bit(trained, resumed, steps):
    ours, plain = trace(trained, f"with{resumed}"), trace(trained, f"without{resumed}")
    assert [*ours] == [*plain] == steps
    for step in steps:
        same = ("loss", "grad_norm", *["rows"] * (step != steps[0]))  # the probes read too
        assert [ours[step][each] for each in same] == [plain[step][each] for each in same]


def test_says_in_a_line_each_what_it_probed_and_how_long_it_took(trained):
    lines = [
        line
        for line in (trained / "with.log").read_text().splitlines()
        if line.startswith("cp_ring: certificate: ")
    ]
    first, second = lines
    assert "probes passed in" in first and "layer 1 (window 5, learnable sinks) under" in first
    assert "probes passed in" in second and "(microbatch of 1x64 tokens under causal)" in second
    stored = json.loads((trained / "saved with" / "cp_ring_certificate.json").read_text())
    assert {"mask", "batch rows"} <= {probe["name"] for probe in stored["probes"]}
    assert stored["about"]["arguments"]["window_size"] == "(5, 0)"


def test_a_fault_stops_the_job_before_it_trains(tmp_path):
    flags = [*TRAINED, "--cp-ring-certify"]
    done = attempt(2, "fault", flags, tmp_path, COMMON, "window widened")
    assert done.code == 2 and not done.losses
    assert (
        "layer 1 (window 5, learnable sinks), causal: mask wrong in 32 pairs, rank 1: query 16 "
        "sees key 10 " in done.rejected
    )
    assert len(done.rejected.splitlines()) == 1
