"""The certificate passes right jobs, whatever the seed, rejects planted faults, and leaves no trace
in the training.
"""

from __future__ import annotations

import json
import shlex

import pytest

from tests.certificate.jobs import HETEROGENEOUS, HYBRID, SECONDS, SINKHORN
from tests.megatron.certificate_faults import FAULTS
from tests.megatron.launch import fork, trace, train
from tests.parity.models import COMMON, GROUPED, LATENT, UNTIED

OSS = f"{UNTIED} --window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable"
OF_DOCUMENTS = (
    "documents merged",
    "boundary shifted by one",
    "padding attended",
    "roll across documents",
)
IN_BF16 = tuple(name for name in FAULTS if "in bf16" in name)
OF_DECLARED = (
    "siblings seen",
    "spans cut at borders",
    "global tokens hidden",
    "positions not continued",
)
# in test_certificate_steps.py
OF_LONGER_JOBS = ("window beyond 256 tokens", "second batch row like the first")
OF_EXPERTS = ("aux loss weighed twice",)
OF_LATENT_WIRE = ("weight gradient twice", "rotated part not returned", "latent not summed over tp")
ELSEWHERE = (
    *OF_DOCUMENTS,
    *OF_DECLARED,
    *OF_LONGER_JOBS,
    *OF_EXPERTS,
    *OF_LATENT_WIRE,
)
OF_OSS = tuple(name for name in FAULTS if name not in ELSEWHERE)
QUICK = ("window off by one", *(name for name in OF_OSS[::3] if name != "window off by one"))
EVERY = {
    "mask", "mask of gradients", "out", "dq", "dk", "dv", "loss of each token", "loss",
    "gradient norm",
    "gradients"
}  # fmt: skip
OF_LATENTS = EVERY - {"dk", "dv"} | {"dlatent", "drope", "dweight"}

OF_PATTERN = (
    "--hybrid-override-pattern M*E-M*- --num-layers 7 --num-experts 4 --moe-router-topk 2 "
    "--moe-expert-capacity-factor 0.5 "
    # the second layer alone has none
    "--moe-token-dispatcher-type alltoall --window-size 5,0 --window-attn-skip-freq 2"
)

TWO_RANKS = {
    "oss": (OSS, QUICK),
    "oss_bf16": (f"{OSS} --bf16", IN_BF16),
    "documents": (f"{UNTIED} --cp-ring-document-mask --mtp-num-layers 1", OF_DOCUMENTS),
    "balanced": (f"{UNTIED} --cp-ring-document-mask --cp-ring-layout balanced --bf16", ()),
    "declared": (f"{UNTIED} --cp-ring-mask-kinds shared-prefix,images,global", OF_DECLARED),
    "declared_balanced": (
        f"{UNTIED} --cp-ring-mask-kinds tree,shared-prefix --cp-ring-layout balanced --window-size "
        "5,0 --window-attn-skip-freq 2 --mtp-num-layers 1 --micro-batch-size 2",
        ("positions not continued",),
    ),
    "moe": (
        f"{UNTIED} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-3 "
        "--expert-model-parallel-size 2 --bf16 --window-size 20,0 --softmax-type off-by-one "
        "--cp-ring-route ring",
        OF_EXPERTS,
    ),
    "hybrid": (f"{HYBRID} {OF_PATTERN}", ("loss mask not split",)),
    "reference": (
        "--position-embedding-type learned_absolute --cp-ring-kernel reference --cp-ring-layout "
        "contiguous --window-size 70,0",
        (),
    ),
}
FOUR_RANKS = {
    "cp4": (f"{OSS} --bf16", ("stale slot", "gradients of one hop lost")),
    "tp2cp2": (f"{OSS} --context-parallel-size 2 --tensor-model-parallel-size 2", ()),
    "pp2cp2": (
        f"{UNTIED} --context-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--cp-ring-document-mask",
        (),
    ),
}
SEEDED = ("oss", "balanced")
QUICK_JOBS = ("oss", "documents", "moe", "cp4")
MORE_ON_TWO = {
    "oss_others": (OSS, tuple(name for name in OF_OSS if name not in QUICK)),
    "declared_others": (
        f"{UNTIED} --cp-ring-mask-kinds "
        "block-causal,block-diffusion,documents,prefix,causal,full,any",
        (),
    ),
    "declared_mla": (
        f"{LATENT} --cp-ring-mask-kinds shared-prefix --cp-ring-layout balanced",
        ("positions not continued",),
    ),
    "heterogeneous": (HETEROGENEOUS, ("rotary positions contiguous",)),
    "sinkhorn": (f"{SINKHORN} --bf16 --micro-batch-size 2", ()),
    "quantile": (SINKHORN.replace("sinkhorn", "quantile_balancing"), ()),
    "mla": (f"{LATENT} --cp-ring-wire plain", ("softmax scale",)),
    "mla_latent": (
        f"{LATENT} --cp-ring-wire latent --bf16",
        ("softmax scale", "stale slot", *OF_LATENT_WIRE[:2]),
    ),
    "int8": (f"{UNTIED} --cp-ring-wire int8 --cp-ring-wire-dtype bfloat16", ("stale slot",)),
}
MORE_ON_FOUR = {
    "dp2cp2": (
        f"{LATENT} --context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
        ("loss divided by cp twice",),
    ),
    "mla_latent_on_tp": (
        f"{LATENT} --cp-ring-wire latent --context-parallel-size 2 --tensor-model-parallel-size 2",
        OF_LATENT_WIRE[2:],
    ),
    "tied": (
        f"{GROUPED} --context-parallel-size 2 --tensor-model-parallel-size 2 --qk-layernorm",
        (),
    ),
}
JOBS = TWO_RANKS | FOUR_RANKS


def examine(ranks, jobs, folder, seeds, faults=True):
    """What each job's certificates found, by (fault, seed): without a fault with each of `seeds`,
    with each fault with seed 1.
    """
    common = [
        *COMMON,
        "--num-layers",
        "2",
        "--seq-length",
        "64",
        "--cp-ring",
        "--calculate-per-token-loss",
    ]
    sizes = ["--context-parallel-size", str(ranks)]  # which a job's own flags override
    for name, (flags, of_job) in jobs.items():
        cases = [("", seed) for seed in seeds] + [(fault, 1) for fault in of_job if faults]
        job, log = (
            {"name": name, "argv": [*common, *sizes, *shlex.split(flags)], "cases": cases},
            folder / f"{name}.log",
        )
        assert fork(ranks, (job, folder, log)) == 0, log.read_text()[-6000:]
    return {
        name: {
            (e["fault"], e["seed"]): e for e in json.loads((folder / f"{name}.json").read_text())
        }
        for name in jobs
    }


class Certificates(dict):
    """Those of each job, made when they are asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, job):
        ranks = 2 if job in TWO_RANKS else 4
        seeds = range(1, 6) if job in SEEDED else [1]
        self |= examine(ranks, {job: JOBS[job]}, self.folder, seeds)
        return self[job]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


def case(job, *more):
    """A test's case, which the default run leaves out unless the job is one of `QUICK_JOBS`."""
    return pytest.param(job, *more, marks=() if job in QUICK_JOBS else pytest.mark.ci)


@pytest.mark.parametrize("job", map(case, JOBS))
def test_a_right_job_passes_with_any_seed(found, job):
    for entry in (entry for (fault, _), entry in found[job].items() if not fault):
        assert entry["rejections"] == []
        assert {probe["name"] for probe in entry["probes"]} >= EVERY
        assert entry["untouched"]
        assert entry["seconds"] < SECONDS


@pytest.mark.parametrize(
    ("job", "fault"), [case(job, fault) for job, (_, faults) in JOBS.items() for fault in faults]
)
def test_a_planted_fault_is_rejected(found, job, fault):
    assert found[job][fault, 1]["rejections"]


def test_a_wrong_mask_names_layer_positions_and_rank(found):
    (line, *_) = found["oss"]["window off by one", 1]["rejections"]
    assert line == (
        "--cp-ring-certify: layer 1 (window 5, learnable sinks), causal: mask wrong in 32 pairs, "
        "rank 1: query 16 sees key 10 of batch row 0, which is declared hidden"
    )


def test_what_is_not_covered_is_said(found):
    assert (
        found["moe"]["", 1]["about"]["not_covered"]
        == found["oss"]["", 1]["about"]["not_covered"]
        == []
    )


@pytest.mark.slow
def test_no_seed_of_fifty_fails_a_right_job(tmp_path):
    found = examine(2, TWO_RANKS | MORE_ON_TWO, tmp_path, range(100, 150), faults=False)
    found |= examine(4, {"cp4": FOUR_RANKS["cp4"]}, tmp_path, range(100, 150), faults=False)
    assert {name: len(entries) for name, entries in found.items()} == dict.fromkeys(found, 50)
    assert [
        (name, e["rejections"])
        for name, entries in found.items()
        for e in entries.values()
        if e["rejections"]
    ] == []


@pytest.mark.slow
def test_more_jobs(tmp_path):
    found = examine(2, MORE_ON_TWO, tmp_path, [1]) | examine(4, MORE_ON_FOUR, tmp_path, [1])
    for name, (_, faults) in (MORE_ON_TWO | MORE_ON_FOUR).items():
        every = OF_LATENTS if "latent" in found[name]["", 1]["about"]["ring"]["wire"] else EVERY
        assert (
            found[name]["", 1]["rejections"] == []
            and {p["name"] for p in found[name]["", 1]["probes"]} >= every
        )
        assert all(found[name][fault, 1]["rejections"] for fault in faults)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job trained with and without its certificate, one with a fault, and one that resumes."""
    folder = tmp_path_factory.mktemp("trained")
    common = shlex.split(
        f"--num-layers 2 --seq-length 64 --context-parallel-size 2 --cp-ring {OSS} "
        "--hidden-dropout 0.1"
    )
    three = [*common, "--train-iters", "5", "--exit-interval", "3"]
    saved = ["--save", str(folder / "saved"), "--save-interval", "100"]
    jobs = {
        "with": [*three, *saved, "--cp-ring-certify"],
        "without": three,
        "fault": [*common, "--cp-ring-certify"],
    }
    more = [*common, "--load", str(folder / "saved"), "--train-iters", "5"]
    jobs |= {"loaded": [*more, "--cp-ring-certify"], "loaded, without": more}
    train(2, jobs, folder, COMMON, {"fault": "window widened"}, codes={"fault": 2})
    return folder


def test_after_loading_a_checkpoint_it_is_made_again_and_changes_no_bit(trained):
    said = [
        line
        for line in (trained / "loaded.log").read_text().splitlines()
        if line.startswith("cp_ring: certificate")
    ]
    first, again = said
    assert first.startswith("cp_ring: certificate: ") and again.startswith(
        "cp_ring: certificate after loading the checkpoint: "
    )
    ours, plain = trace(trained, "loaded"), trace(trained, "loaded, without")
    assert sorted(ours) == [4, 5]
    for step, line in plain.items():
        assert (ours[step]["loss"], ours[step]["grad_norm"]) == (line["loss"], line["grad_norm"])


def test_the_training_is_the_same_to_the_last_bit(trained):
    ours, plain = trace(trained, "with"), trace(trained, "without")
    assert sorted(ours) == sorted(plain) == [1, 2, 3]
    assert [(ours[step]["loss"], ours[step]["grad_norm"]) for step in ours] == [
        (plain[s]["loss"], plain[s]["grad_norm"]) for s in ours
    ]


def test_says_in_one_line_what_it_probed_and_how_long_it_took(trained):
    lines = [
        line
        for line in (trained / "with.log").read_text().splitlines()
        if line.startswith("cp_ring: certificate: ")
    ]
    assert len(lines) == 1
    assert (
        "probes passed in" in lines[0]
        and "layer 1 (window 5, learnable sinks) under causal" in lines[0]
    )
    stored = json.loads((trained / "saved" / "cp_ring_certificate.json").read_text())
    assert stored["seconds"] < SECONDS and all(probe["passed"] for probe in stored["probes"])
    assert stored["about"]["attention"]["window_size"] == [5, 0]


def rejected(folder, name):
    """Why job `name` did not train: what the first of its ranks to end said."""
    first, *_ = folder.glob(f"{name}.*.jsonl")
    return json.loads(first.read_text())["rejected"]


def test_a_fault_stops_the_job_before_it_trains(trained):
    line = rejected(trained, "fault")
    assert (
        "layer 1 (window 5, learnable sinks), causal: mask wrong in 32 pairs, rank 1: query 16 "
        "sees key 10" in line
    )
    assert len(line.splitlines()) == 1
