"""`python -m cp_ring.run` runs a script as Python would, with ring attention when its flags ask for
it.
"""

import re
import sys

import pytest

from cp_ring.megatron import settings
from tests.megatron.launch import HERE, RING, TINY, environment, train
from tests.rank_pool import python

SCRIPT = str(HERE / "small_script.py")
FLAGS = [*TINY, "--train-iters", "3", "--log-interval", "1", "--calculate-per-token-loss"]

PROBE = """
import os, sys
before = set(sys.modules)
import megatron.training.arguments as arguments
import torch
from cp_ring.megatron.options import SETTINGS, Options
from cp_ring import patches
print("applied:", patches.applied())
print("script:", sys.argv[0], __file__)
print("argv:", sys.argv[1:], "name:", __name__, "path:", sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
homes = {function.__module__ for function in (arguments.add_megatron_arguments, arguments.parse_args, torch.cuda.synchronize)}
print("homes:", sorted(homes))
"""


def losses(output):
    return [float(value) for value in re.findall(r"lm loss: (\S+) \|", output)]


@pytest.mark.ci
def test_an_unmodified_script_trains_with_ring_attention(tmp_path):
    """By torch's launcher in tests/docs/test_commands.py."""
    train(2, {"ring": [SCRIPT, *RING]}, tmp_path, FLAGS)
    train(1, {"stock": [SCRIPT, "--cp-ring-cpu"]}, tmp_path, FLAGS)
    ring, stock = (losses((tmp_path / f"{name}.log").read_text()) for name in ("ring", "stock"))
    assert len(stock) == 3 and ring == pytest.approx(stock, rel=1e-5)
    by_spec = ["--spec", "cp_ring.megatron.specs", "gpt_local", "--context-parallel-size", "2"]
    train(2, {"spec": [SCRIPT, "--cp-ring-cpu", *by_spec]}, tmp_path, FLAGS)
    output = (tmp_path / "spec.log").read_text()
    assert losses(output) == ring
    # Its batches hold an attention mask.
    assert (
        output.count(
            "the batches hold the causal attention mask, which ring attention does not need"
        )
        == 1
    )


@pytest.mark.ci
def test_without_its_flags_nothing_is_changed(tmp_path):
    flags = ["--some-flag", "3", "--cp-ring-timing", "5"]
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    done = python("-m", "cp_ring.run", script.name, *flags, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "applied: []" in done.stdout
    assert f"script: probe.py {script}\n" in done.stdout
    assert f"argv: {flags} name: __main__ path: True" in done.stdout
    assert "homes: ['megatron.training.arguments', 'torch.cuda']" in done.stdout


AS_MEGATRONS = """
def is_dataset_built_on_rank():
    return is_packed_sequence or is_first_or_last_pipeline_stage()
config = dict(inter_document_masking=args.dataloader_inter_document_masking)
"""
MENDED = f"{AS_MEGATRONS}is_packed_sequence = args.sft or args.dataloader_inter_document_masking"


@pytest.mark.parametrize(
    "flags, text, lack",
    [
        ("--pipeline-model-parallel-size 3", AS_MEGATRONS, True),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 2", AS_MEGATRONS, True),
        (
            "--pipeline-model-parallel-size=2 --num-layers-per-virtual-pipeline-stage 1",
            AS_MEGATRONS,
            True,
        ),
        ("--pipeline-model-parallel-size 2", AS_MEGATRONS, False),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
            AS_MEGATRONS,
            False,
        ),
        ("--micro-batch-size 2", AS_MEGATRONS, False),
        ("--pipeline-model-parallel-size 3", MENDED, False),
        ("--pipeline-model-parallel-size 3", "a script of another kind", False),
    ],
)
def test_stages_that_the_script_builds_no_rows_for(flags, text, lack):
    from cp_ring.patches.install import asked_of
    from cp_ring.run import _stages_lack_rows

    assert _stages_lack_rows(asked_of(flags.split()), text) is lack


def test_without_cuda_the_flag_for_the_cpu_is_named():
    without = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "cp_ring.run", SCRIPT, "--cp-ring", env=without)
    line = "cp_ring: error: --cp-ring: torch finds no CUDA device here; add --cp-ring-cpu to train"
    assert done.returncode == 2 and line in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.py", "--cp-ring"], "nowhere.py does not exist"),
        ([str(HERE), "--cp-ring"], f"{HERE} is not a file"),
        (
            [SCRIPT, "--cp-ring", "--cp-ring-cpu", "--cp-ring-layout", "contiguous"],
            "--cp-ring-layout contiguous needs cp_ring.pretrain_gpt",
        ),
        (
            [SCRIPT, "--cp-ring", "--cp-ring-cpu", "--reset-attention-mask"],
            "give --dataloader-inter-document-masking (Megatron 0.19 and later)",
        ),
        (  # this file names get_thd_batch_on_this_cp_rank, as the script of Megatron's branch dev
            [__file__, "--cp-ring", "--cp-ring-cpu", "--sft", "--context-parallel-size", "2"],
            "loses the documents of its rows: run cp_ring.pretrain_gpt in place of it",
        ),
    ],
)
def test_rejects_before_the_script_starts(monkeypatch, capsys, arguments, message):
    from cp_ring import run

    monkeypatch.setattr("cp_ring.run.install", settings.flags)
    monkeypatch.setattr(sys, "argv", ["cp_ring.run", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        run.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("cp_ring: error: ") and message in error and error.count("\n") == 1
