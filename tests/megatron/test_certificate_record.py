"""The certificate beside the checkpoints: written whole, and compared with the job that resumes
from them.
"""

import argparse
import json

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron import rejection
from cp_ring.megatron.certificate import record
from cp_ring.megatron.certificate.report import Certificate, Probe


@pytest.fixture
def job(tmp_path):
    """The arguments of a job that resumes from a certified checkpoint."""
    args = argparse.Namespace(
        save=str(tmp_path), load=str(tmp_path), window_size=(128, 0), window_attn_skip_freq=2,
        softmax_type="learnable",
        num_attention_heads=4, kv_channels=16, multi_latent_attention=False,
        position_embedding_type="rope", rotary_base=10000,
        context_parallel_size=2, cp_ring_layout="zigzag",
    )  # fmt: skip
    record.save(
        args,
        Certificate(
            [Probe("mask", "layer 1", "causal", 0.0, 0.0)],
            {"attention": record.attention_settings(args)},
        ),
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    return args


def test_is_written_whole(job, tmp_path):
    content = json.loads((tmp_path / record.NAME).read_text())
    assert content["probes"][0]["passed"] and content["about"]["attention"]["window_size"] == [
        128,
        0,
    ]
    with pytest.raises(TypeError):
        record.write(tmp_path / record.NAME, Certificate(about={"bad": object()}))
    assert json.loads((tmp_path / record.NAME).read_text()) == content
    assert {path.name for path in tmp_path.iterdir()} == {
        record.NAME,
        "latest_checkpointed_iteration.txt",
    }


def test_the_same_attention_at_another_size_and_layout_resumes(job, capsys):
    job.context_parallel_size, job.cp_ring_layout = 4, "contiguous"
    record.check(job)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("window_size", (64, 0), r"--window-size was \[128, 0\], now \[64, 0\]"),
        ("window_attn_skip_freq", 3, "--window-attn-skip-freq was 2, now 3"),
        ("cp_ring_document_mask", True, "--cp-ring-document-mask was False, now True"),
    ],
)
def test_another_mask_is_rejected(job, name, value, flag):
    setattr(job, name, value)
    with pytest.raises(ConfigError, match=flag) as error:
        record.check(job)
    assert "\n" not in str(error.value)


def test_another_sink_is_said(job, capsys, monkeypatch):
    monkeypatch.setattr(rejection, "_noted", set())
    job.softmax_type = "vanilla"
    record.check(job)
    assert "--softmax-type was learnable, now vanilla" in capsys.readouterr().out


def test_without_a_checkpoint_nothing_is_compared(job, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    job.window_size = None
    record.check(job)


def test_an_unreadable_certificate_is_said(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rejection, "_noted", set())
    (tmp_path / record.NAME).write_text("{")
    record.check(job)
    assert "is not readable" in capsys.readouterr().out
