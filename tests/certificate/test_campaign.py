"""A small part of the certificate's campaign, which `python -m tests.certificate` runs as a whole: a
fault of each kind is stopped, and right jobs pass.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cp_ring.megatron.flags.argument_parser import build_parser
from tests.certificate import __main__ as campaign
from tests.certificate import checkouts
from tests.certificate.faults import DATA, DATA_OF_TP, FAULTS, OF_BORDERS, OF_MEANS, SUBTLE
from tests.certificate.jobs import (
    CONVERSATIONS,
    DOCUMENTED,
    FAULTY,
    OF_EXPERTS,
    OSS,
    REAL,
    REAL_OF_EXPERTS,
    UNDRAWN,
    Job,
    real_job,
    right_job,
)
from tests.parity.models import EXPERTS, UNTIED

# a user's script, where no Megatron-LM is at hand
ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "tests" / "megatron" / "small_script.py")
PACKING = str(Path(SMALL).with_name("packing_script.py"))
SAMPLE = ("label at a chunk's border", "loss divided by cp twice", "fractional weights rounded")
KINDS = {
    "mask": ("oss", "mask dropped to plain causal"),
    "window": ("oss", "window off by one"),
    "length": ("long", "window beyond 256 tokens"),
    "batch row": ("long", "second batch row like the first"),
    "sink": ("oss", "sink gradient dropped"),
    "scale": ("oss", "softmax scale"),
    "positions": ("oss", "rotary positions of one rank shifted"),
    "labels": ("oss", "label at a chunk's border"),
    "loss mask": ("oss", "loss mask of another rank"),
    "loss scale": ("oss", "loss divided by cp twice"),
    "order of chunks": ("oss", "chunk order swapped"),
    "documents": ("documents", "boundary shifted by one"),
    "recurrent state": ("hybrid-documents", "states run across documents"),
    "states of branches": ("hybrid-branches", "states begin anew on each rank"),
    "virtual stages": ("production", "documents lost on virtual stages"),
    "recomputation": ("production", "kept output halved"),
    "microbatches": ("production", "second microbatch lost"),
    "latent gradient": ("latents", "rotated part not returned"),
    "collate function": ("production", "labels shifted by the collate function"),
    "sampler": ("production", "rows of another context-parallel rank"),
    "documents of a rank": ("production", "documents lost on the second rank"),
}
"""Kinds of faults: a job, and a fault that is planted in it."""


def passes(right, **more):
    assert not right.get("error"), right
    wanted = {"rejections": [], "failure": "", "not_covered": [], **more}
    assert {name: right[name] for name in wanted} == wanted, right


def examine(job, folder, script=SMALL):
    """What the certificate of `job` rejects with each of its faults; without one it passes."""
    right, *faulty = (
        campaign.examine(job, script, folder, fault, through=True) for fault in ("", *job.faults)
    )
    passes(right)
    return [found["rejections"] for found in faulty]


@pytest.mark.ci
@pytest.mark.parametrize("name", {job: 0 for job, _ in KINDS.values()})
def test_a_fault_of_each_kind_is_stopped(tmp_path, name):
    (job,) = (job for job in FAULTY if job.name == name)
    faults = tuple(fault for of, fault in KINDS.values() if of == name)
    assert {*faults} <= {*job.faults}
    found = campaign.faults([replace(job, faults=faults)], "", tmp_path)
    assert [entry for entry in found if not entry["stopped"]] == []
    lines = {entry["fault"]: entry["how"] for entry in found}
    for fault in DATA.keys() & {*faults}:
        assert "microbatch of 1x64 tokens" in lines[fault]
    if name == "oss":
        assert lines["window off by one"] == (
            "--cp-ring-certify: layer 1 (window 5, learnable sinks), causal: mask wrong in 32 "
            "pairs, rank 1: query 16 sees key 10 of batch row 0, which is declared hidden"
        )


@pytest.mark.ci
def test_a_fault_leaves_nothing_to_the_next(tmp_path):
    """Its plans are in caches of its own ranks."""
    (job,) = (job for job in FAULTY if job.name == "documents")
    _, right = campaign.faults([replace(job, faults=("documents merged", ""))], "", tmp_path)
    assert not right["stopped"] and right["how"] == "the certificate passes"


OF_TP = "--context-parallel-size 2 --tensor-model-parallel-size 2"
BALANCED = "--moe-router-load-balancing-type global_aux_loss --context-parallel-size 2"
JOBS = {
    "a script as users have it": (
        Job("sample", 2, f"{OSS} --num-layers 2 --calculate-per-token-loss", SAMPLE,
            by_script=True), ""),
    # cp_ring's own forward step finds them by positions
    "documents whose ends the data set names too": (
        Job("ends", 2, f"{UNTIED} --num-layers 1 --dataloader-inter-document-masking",
            ("documents merged",)), ""),
    "experts that are balanced over all data-parallel ranks": (
        Job("balanced", 4, f"{EXPERTS} --num-layers 1 {BALANCED}", OF_EXPERTS), ""),
    # the forward step of this script reads on each rank
    "tensor-parallel ranks that read for themselves": (
        Job("tp", 4, f"{UNTIED} --num-layers 1 {OF_TP}",
            (*DATA_OF_TP, "loss mask not split", "position ids of each rank from 0"),
            by_script=True), "microbatch of 1x64 tokens"),
    "a mean loss of a script": (
        Job("mean", 2, f"{UNTIED} --num-layers 1", ("loss averaged by rank", *OF_MEANS),
            by_script=True), "gradients off"),
}  # fmt: skip
"""Jobs with faults, each of which is stopped with a line that has these words."""


@pytest.mark.ci
@pytest.mark.parametrize("name", JOBS)
def test_each_fault_of_a_job_is_stopped(tmp_path, name):
    job, words = JOBS[name]
    for lines in examine(job, tmp_path):
        assert any(words in line for line in lines), lines


@pytest.mark.ci
def test_conversations_of_a_script(tmp_path):
    """Their first microbatch shows faults that the layers of the tiny model do not read."""
    flags = f"{UNTIED} --num-layers 1 --calculate-per-token-loss {CONVERSATIONS}"
    job = Job("conversations", 2, flags, tuple(OF_BORDERS), by_script=True)
    ((line,),) = examine(job, tmp_path, PACKING)
    assert "packed: position id wrong in " in line


@pytest.mark.ci
def test_experts_with_biases_are_covered(tmp_path):
    """Megatron itself cannot have them on one rank alone, as the tiny model does."""
    flags = f"{EXPERTS} --context-parallel-size 2 --moe-token-dispatcher-type alltoall"
    job = Job("biases", 2, flags, without=("--disable-bias-linear",))
    passes(campaign.examine(job, "", tmp_path))


@pytest.mark.ci
def test_a_job_that_fails_is_no_stopped_fault(tmp_path):
    job = Job("broken", 2, "--no-such-flag", ("mask widened",))
    (entry,) = campaign.faults([job], "", tmp_path)
    assert not entry["stopped"] and "unrecognized arguments: --no-such-flag" in entry["how"]


@pytest.mark.parametrize("number", range(4))
def test_flags_of_real_scripts_get_as_far_as_the_first_step(tmp_path, number):
    """Their certificate passes and leaves the process as it was; then the model is built."""
    passes(campaign.examine(real_job(number, 4, number % 2 == 1), SMALL, tmp_path), changed={})


@pytest.mark.ci
@pytest.mark.parametrize(
    "name, fault",
    [
        ("mask or none", "siblings seen"),
        ("gradients in bfloat16", "gradients of one hop twice"),
        ("averages", "loss divided by cp twice"),
    ],
)
def test_flags_of_the_documentation(tmp_path, name, fault):
    (job,) = (job for job in DOCUMENTED if job.name == name)
    assert all(examine(replace(job, faults=(fault,)), tmp_path))


def test_right_jobs_have_every_training_flag_of_the_documentation():
    known = {word for action in build_parser()._actions for word in action.option_strings}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {word for page in pages for word in re.findall(r"--[a-z][\w-]+", page.read_text())}
    jobs = [*DOCUMENTED, *(right_job(number, True) for number in range(200))]
    drawn = {word for job in jobs for word in job.argv()}
    assert named & known - drawn == set(" ".join(UNDRAWN.values()).split()) & known


def test_there_are_at_least_40_flags_of_real_scripts():
    words = (REAL + REAL_OF_EXPERTS).replace(";", " ").split()
    drawn = {word for number in range(200) for word in right_job(number, False).argv()}
    assert len({word for word in words if word.startswith("--")} & drawn) >= 60


def test_there_are_at_least_40_faults_and_another_right_job_for_each_number():
    assert len(set(FAULTS)) == len(FAULTS) >= 40 and set(SUBTLE) < set(FAULTS)
    jobs = [right_job(number, with_script=True) for number in range(200)]
    assert len({job.flags for job in jobs}) > 190 and sum(job.by_script for job in jobs) == 100
    assert right_job(7, with_script=True) == jobs[7]


@pytest.mark.slow
def test_nothing_is_left_out_in_checkouts_of_megatron_lm(megatron_lm):
    """Eight models under three splits, each with the checkout's own Megatron."""
    every = list(checkouts.MODELS), list(checkouts.SPLITS)
    for entry in checkouts.examine(str(megatron_lm), *every):
        assert entry["passed"] and checkouts.KNOWN.issuperset(entry["not_covered"]), entry
