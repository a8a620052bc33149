"""The certificate of jobs with a script's own forward step, without per-token loss, at the job's
own length and batch size.
"""

from types import SimpleNamespace

import pytest

from cp_ring.megatron.certificate import certify as module
from cp_ring.megatron.certificate.report import Certificate, Probe
from tests.certificate import __main__ as campaign
from tests.certificate.jobs import Job
from tests.megatron.launch import HERE
from tests.parity.models import UNTIED

RIGHT_STEPS = ("writes_into_its_batch", "writes_into_its_tensors", "changes_the_process")
FAILING_STEPS = ("fails_before_the_ring", "fails_behind_the_ring")


def probes(folder, step, flags="", skew=300.0, fault=""):
    """The certificate of a job of two ranks with this forward step."""
    flags = f"{UNTIED} --num-layers 1 {flags}"
    job = Job(step, 2, flags, by_script=True, step=step, skew=skew)
    return campaign.examine(job, str(HERE / "small_script.py"), folder, fault, through=True)


@pytest.mark.parametrize("step", RIGHT_STEPS)
def test_a_right_step_passes(tmp_path, step):
    entry = probes(tmp_path, step)
    assert entry["rejections"] == [] and entry["failure"] == "" and entry["not_covered"] == []
    assert "gradients" in {probe["name"] for probe in entry["probes"]} and entry["changed"] == {}


def test_a_mean_over_ranks_is_not_covered(tmp_path):
    """Megatron averages it over ranks, whatever it is: tokens may weigh unlike."""
    entry = probes(tmp_path, "mean_over_all_ranks")
    assert entry["rejections"] == [] and entry["failure"] == ""
    assert entry["not_covered"] == [
        "loss and gradients: the ranks average means, in which tokens weigh unlike"
    ]
    names = {probe["name"] for probe in entry["probes"]}
    assert "loss of each token" in names and "gradients" not in names


@pytest.mark.parametrize(
    "some", [pytest.param(3, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_step_that_misreads_the_batch_is_rejected(tmp_path, some):
    """At context parallel size 1 it has the same losses and gradients. In CI, each third one."""
    from tests.megatron.certificate_steps import MISREAD

    flags = "--micro-batch-size 2 --mtp-num-layers 1"
    right = probes(tmp_path, "further_predictions", flags)
    assert right["rejections"] == [] and right["failure"] == ""
    for fault in [*MISREAD][::some]:
        entry = probes(tmp_path, "further_predictions", flags, fault=fault)
        lines = [line for line in entry["rejections"] if "hid" in line or "by the batch" in line]
        assert lines, (fault, entry["rejections"])


def test_a_step_that_raises_on_all_ranks_is_not_covered(tmp_path):
    """The certificate of the first microbatch shows that the job's groups still work."""
    entry = probes(tmp_path, "fails_everywhere")
    assert entry["failure"].startswith("ValueError: no such batch (certificate_steps.py, line ")
    assert entry["not_covered"] == [f"the loss ({entry['failure']})"]
    assert entry["rejections"] == [] and {"mask", "out"} <= {
        probe["name"] for probe in entry["probes"]
    }
    assert entry["changed"] == {}


@pytest.mark.parametrize("step", FAILING_STEPS)
def test_a_step_that_raises_on_one_rank_ends_the_job(tmp_path, step):
    """The other rank waits for a message of it, far longer than the launcher."""
    entry = probes(tmp_path, step, skew=1.0)
    (line,) = entry["rejections"]
    assert "ValueError: rank 1 has no such " in line and " (certificate_steps.py, line " in line
    assert line.endswith(
        "(rank 1, not on all ranks); --no-cp-ring-certify trains without the probes"
    )


@pytest.fixture
def ended(monkeypatch):
    """`certify` with a certificate of ours: returns how the job ends, or what it says."""

    def run(certificate, choice="on", before=None):
        said = []

        def reject(message):
            raise SystemExit(message)

        monkeypatch.setattr(module.rejection, "reject", reject)
        monkeypatch.setattr(module, "note", said.append)
        monkeypatch.setattr(module, "run_probes", lambda args, **options: certificate)
        monkeypatch.setattr(module.settings, "current", lambda: SimpleNamespace(certify=choice))
        monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
        try:
            module.certify(SimpleNamespace(), before=before)
        except SystemExit as end:
            return [str(end)]
        return said

    return run


def test_a_line_begins_with_what_is_not_covered(ended):
    probe = Probe("mask", "layer 1 (no window)", "causal", 0.0, 0.0)
    up_to = {"layer 1 (no window) under causal": "4096 of 131072 tokens"}
    why = "forward_step: ValueError: x (rank 1)"
    certificate = Certificate([probe], {}, [f"the loss ({why})"], up_to)
    (summary,) = ended(certificate)
    assert summary.startswith(
        "certificate: not covered: the loss (forward_step: ValueError: x (rank 1)); 1 probes "
        "passed in "
    )
    assert "under causal, up to 4096 of 131072 tokens" in summary
    (line,) = ended(certificate, "strict")
    assert line.startswith(
        "--cp-ring-certify strict: the probes do not cover the loss (forward_step: ValueError: x (rank 1))"
    )
    assert (
        len(ended(Certificate([probe], up_to=up_to), "strict")) == 1
    )  # the length alone stops nothing
    of_loss = Certificate(
        [probe, Probe("loss", "tiny model", "causal", 0.0, 1.0)], {}, ["Mamba layers"]
    )
    (summary,) = ended(of_loss)
    assert summary.startswith("certificate: not covered: Mamba layers; 2 probes passed in ")


def test_the_line_about_the_first_microbatch_tells_what_is_new(ended):
    before = Certificate([], {}, ["the loss (KeyError: 0)"])
    after = Certificate([], {}, [*before.not_covered, "the job's own microbatches"])
    assert ended(after, before=before) == [
        "certificate: not covered: the job's own microbatches; 0 probes passed in 0.0 s"
    ]
    assert after.not_covered == ["the job's own microbatches", *before.not_covered]
