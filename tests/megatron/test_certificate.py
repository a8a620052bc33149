"""The certificate passes right jobs, whatever the seed, refuses planted faults, and leaves no trace in the training."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.megatron.certificate_faults import FAULTS
from tests.megatron.launch import fork, trace, train
from tests.parity.rows import COMMON, LATENT, UNTIED

OSS = f"{UNTIED} --window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable"
OF_DOCUMENTS = ("documents merged", "boundary shifted by one", "padding attended", "roll across documents")
IN_BF16 = tuple(name for name in FAULTS if "in bf16" in name)
OF_OSS = tuple(name for name in FAULTS if name not in OF_DOCUMENTS)
SEEDED = ("oss", "oss_bf16", "documents", "balanced", "mla")
EVERY = {
    "mask", "mask of gradients", "out", "dq", "dk", "dv", "loss of each token", "loss", "gradient norm", "gradients"
}  # fmt: skip

TWO_RANKS = {
    "oss": (OSS, OF_OSS),
    "oss_bf16": (f"{OSS} --bf16", IN_BF16),
    "documents": (f"{UNTIED} --cp-ring-document-mask --mtp-num-layers 1", OF_DOCUMENTS),
    "balanced": (f"{UNTIED} --cp-ring-document-mask --cp-ring-layout balanced --bf16", ()),
    "mla": (LATENT, ("softmax scale",)),
    "moe": (f"{UNTIED} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --window-size 20,0", ()),
    "off_by_one": ("--position-embedding-type learned_absolute --softmax-type off-by-one --cp-ring-route ring --bf16", ()),
    "reference": (f"{UNTIED} --cp-ring-kernel reference --cp-ring-layout contiguous --window-size 70,0", ()),
}
FOUR_RANKS = {
    "cp4": (f"{OSS} --context-parallel-size 4", ("stale slot", "gradients of one hop lost")),
    "tp2cp2": (f"{OSS} --context-parallel-size 2 --tensor-model-parallel-size 2", ()),
    "pp2cp2": (f"{UNTIED} --context-parallel-size 2 --pipeline-model-parallel-size 2 --cp-ring-document-mask", ()),
    "dp2cp2": (
        f"{LATENT} --context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
        ("loss divided by cp twice",),
    ),
}


def examine(ranks, jobs, folder, seeds):
    """What each job's certificates found, by (fault, seed)."""
    common = [*COMMON, "--num-layers", "2", "--seq-length", "64", "--cp-ring", "--calculate-per-token-loss"]
    for name, (flags, faults) in jobs.items():
        cases = [("", seed) for seed in (seeds if name in SEEDED else [1])] + [(fault, 1) for fault in faults]
        job, log = {"name": name, "argv": [*common, *shlex.split(flags)], "cases": cases}, folder / f"{name}.log"
        assert fork(ranks, (job, folder, log)) == 0, log.read_text()[-6000:]
    return {name: {(e["fault"], e["seed"]): e for e in json.loads((folder / f"{name}.json").read_text())} for name in jobs}


def on_two_ranks(folder, seeds, faults=True):
    jobs = {name: (f"--context-parallel-size 2 {flags}", list_ if faults else ()) for name, (flags, list_) in TWO_RANKS.items()}
    return examine(2, jobs, folder, seeds)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return on_two_ranks(folder, range(1, 6)) | examine(4, FOUR_RANKS, folder, [1])


JOBS = TWO_RANKS | FOUR_RANKS


@pytest.mark.parametrize("job", JOBS)
def test_a_right_job_passes_with_any_seed(found, job):
    for entry in (entry for (fault, _), entry in found[job].items() if not fault):
        assert entry["refusals"] == []
        assert {probe["name"] for probe in entry["probes"]} >= EVERY
        assert entry["untouched"]
        assert entry["seconds"] < 10


@pytest.mark.parametrize(("job", "fault"), [(job, fault) for job, (_, faults) in JOBS.items() for fault in faults])
def test_a_planted_fault_is_refused(found, job, fault):
    assert found[job][fault, 1]["refusals"]


def test_a_wrong_mask_names_layer_positions_and_rank(found):
    (line, *_) = found["oss"]["window off by one", 1]["refusals"]
    assert line == (
        "--cp-ring-certify: layer 1 (window 5, learnable sinks), causal: mask wrong in 32 pairs, "
        "rank 1: query 16 sees key 10 of row 0, which is declared hidden"
    )


def test_what_is_not_covered_is_said(found):
    assert found["moe"]["", 1]["about"]["not_covered"] == ["experts, in the loss"]
    assert found["oss"]["", 1]["about"]["not_covered"] == []


@pytest.mark.slow
def test_no_seed_of_fifty_fails_a_right_job(tmp_path):
    found = on_two_ranks(tmp_path, range(100, 150), faults=False)
    assert {name: [e["refusals"] for e in entries.values() if e["refusals"]] for name, entries in found.items()} == {
        name: [] for name in TWO_RANKS
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job trained with and without its certificate, and one with a fault that must not train."""
    folder = tmp_path_factory.mktemp("trained")
    common = shlex.split(f"--num-layers 2 --seq-length 64 --context-parallel-size 2 --cp-ring {OSS} --hidden-dropout 0.1")
    saved = ["--save", str(folder / "saved"), "--save-interval", "100"]
    jobs = {"with": [*common, *saved, "--cp-ring-certify"], "without": common, "fault": [*common, "--cp-ring-certify"]}
    train(2, jobs, folder, COMMON, {"fault": "window widened"}, codes={"fault": 2})
    return folder


def test_the_training_is_the_same_to_the_last_bit(trained):
    ours, plain = trace(trained, "with"), trace(trained, "without")
    assert sorted(ours) == sorted(plain) == [1, 2, 3]
    assert [(ours[step]["loss"], ours[step]["grad_norm"]) for step in ours] == [
        (plain[s]["loss"], plain[s]["grad_norm"]) for s in ours
    ]


def test_says_in_one_line_what_it_probed_and_how_long_it_took(trained):
    lines = [line for line in (trained / "with.log").read_text().splitlines() if line.startswith("cp_ring: certificate: ")]
    assert len(lines) == 1
    assert "probes passed in" in lines[0] and "layer 1 (window 5, learnable sinks) under causal" in lines[0]
    stored = json.loads((trained / "saved" / "cp_ring_certificate.json").read_text())
    assert stored["seconds"] < 10 and all(probe["passed"] for probe in stored["probes"])
    assert stored["about"]["attention"]["window_size"] == [5, 0]


def test_a_fault_stops_the_job_before_it_trains(trained):
    lines = [line for line in (trained / "fault.log").read_text().splitlines() if line.startswith("cp_ring: error: ")]
    assert len(lines) == 1
    assert "layer 1 (window 5, learnable sinks), causal: mask wrong in 32 pairs, rank 1: query 16 sees key 10" in lines[0]
    assert trace(trained, "fault") == {}
