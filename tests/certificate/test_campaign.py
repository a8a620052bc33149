"""A small part of the certificate's campaign: faults are stopped and a right job passes, through a
script's own door.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificate import __main__ as campaign
from tests.certificate import checkouts
from tests.certificate.faults import FAULTS, OF_MEANS, SUBTLE
from tests.certificate.jobs import FAULTY, OSS, Job, right_job
from tests.parity.models import EXPERTS, UNTIED

# a user's script, where no Megatron-LM is at hand
SMALL = str(Path(__file__).parents[1] / "megatron" / "small_script.py")
SAMPLE = (
    "group permuted", "rotary positions of one rank shifted", "label at a chunk's border",
    "loss divided by cp twice",
    "fractional weights rounded", "label at the end of the last chunk",
)  # fmt: skip
IN_LONG_ROWS = (
    "window of one layer", "window of one layer in long rows",
    "rotary positions one further beyond 256",
    "label at the border of chunks of 128 and more",
    "weights clipped at 1",
)  # fmt: skip


@pytest.mark.ci
def test_a_script_as_users_have_it(tmp_path):
    job = Job(
        "sample", 2, f"{OSS} --num-layers 2 --calculate-per-token-loss", SAMPLE, by_script=True
    )
    right, *faulty = campaign.examine(
        job, [("", 1), *((fault, 1) for fault in SAMPLE)], SMALL, tmp_path
    )
    assert (right["rejections"], right["failure"], right["not_covered"]) == ([], "", []), right
    assert [found for found in faulty if not found.get("rejections")] == []


@pytest.mark.ci
def test_a_mean_loss_of_a_script(tmp_path):
    faults = ("loss averaged by rank", *OF_MEANS)
    job = Job("mean", 2, f"{UNTIED} --num-layers 1", faults, by_script=True)
    right, *faulty = campaign.examine(job, [(fault, 1) for fault in ("", *faults)], SMALL, tmp_path)
    assert (right["rejections"], right["failure"], right["not_covered"]) == ([], "", []), right
    for found in faulty:
        assert any("gradients off" in line for line in found["rejections"]), found


@pytest.mark.ci
def test_faults_of_long_rows_and_of_a_single_layer(tmp_path):
    flags = (
        f"{UNTIED} --num-layers 4 --window-size 5,0 --seq-length 512 --max-position-embeddings 512 "
        "--calculate-per-token-loss"
    )
    tried = [(fault, 1) for fault in ("", *IN_LONG_ROWS)]
    right, *faulty = campaign.examine(Job("long", 2, flags), tried, "", tmp_path)
    assert (right["rejections"], right["failure"], right["not_covered"]) == ([], "", []), right
    assert [found for found in faulty if not found.get("rejections")] == []


@pytest.mark.ci
def test_experts_with_biases_are_covered(tmp_path):
    """Megatron itself cannot have them on one rank alone, as the tiny model does."""
    flags = (
        f"{EXPERTS} --context-parallel-size 2 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall"
    )
    job = Job("biases", 2, flags, without=("--disable-bias-linear",))
    (right,) = campaign.examine(job, [("", 1)], "", tmp_path)
    assert (right["rejections"], right["failure"], right["not_covered"]) == ([], "", []), right


@pytest.mark.ci
def test_a_job_that_fails_is_no_stopped_fault(tmp_path):
    job = Job("broken", 2, "--no-such-flag", ("mask widened",))
    (entry,) = campaign.faults([job], "", tmp_path)
    assert not entry["stopped"] and "unrecognized arguments: --no-such-flag" in entry["how"]


def test_there_are_at_least_40_faults_and_another_right_job_for_each_number():
    assert len(set(FAULTS)) == len(FAULTS) >= 40 and set(SUBTLE) < set(FAULTS)
    jobs = [right_job(number, with_script=True) for number in range(200)]
    assert len({job.flags for job in jobs}) > 190 and sum(job.by_script for job in jobs) == 100
    assert right_job(7, with_script=True) == jobs[7]


@pytest.fixture
def script(megatron_lm):
    """The script of the first checkout that --megatron-lm names."""
    return str(Path(megatron_lm[0]) / campaign.SCRIPT) if megatron_lm else ""


@pytest.mark.slow
@pytest.mark.parametrize("job", FAULTY, ids=lambda job: job.name)
def test_every_fault_is_stopped(tmp_path, job, script):
    if job.by_script and not script:
        pytest.skip("--megatron-lm names no checkout")
    found = campaign.faults([job], script, tmp_path)
    assert [entry for entry in found if not entry["stopped"]] == []


@pytest.mark.slow
def test_nothing_is_left_out_in_checkouts_of_megatron_lm(megatron_lm):
    """Eight models under three splits, each with the checkout's own Megatron."""
    whole = [
        checkout for checkout in megatron_lm if (Path(checkout) / "megatron" / "core").is_dir()
    ]
    if not whole:
        pytest.skip("--megatron-lm names no checkout with megatron/core")
    for checkout in whole:
        for entry in checkouts.examine(checkout, list(checkouts.MODELS), list(checkouts.SPLITS)):
            assert checkouts.cell(entry) == "covered", (checkout, entry)


@pytest.mark.slow
def test_200_right_jobs_of_random_flags_pass(tmp_path, script):
    jobs = (right_job(number, bool(script)) for number in range(200))
    assert [entry for entry in campaign.right(jobs, script, tmp_path) if not entry["passed"]] == []
