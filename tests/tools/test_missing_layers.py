"""A job of TransformerEngine's layers where there is none: rejected before a rank starts; a dry
run may be for another machine.
"""

import re

import pytest
import yaml

from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from cp_ring.tools import job as jobs
from cp_ring.tools import train
from tests.rings import refused
from tests.tools.slurm.job import TINY

REJECTED = r'transformer_impl: transformer_engine .*pip install -e "\.\[te\]", or give transformer_impl: local'


@pytest.fixture(autouse=True)
def no_transformer_engine(monkeypatch):
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(train, "run", lambda *_: pytest.fail("a rank was started"))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A job that leaves transformer_impl to Megatron, for a node of four GPUs."""
    monkeypatch.setattr(jobs, "choose_device", lambda *_: ("cuda", {}))
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cuda", "run_dir": str(tmp_path / "run")}})
    )
    return str(path)


@pytest.mark.parametrize("given", [[], ["megatron.transformer_impl=transformer_engine"]])
def test_is_rejected_on_a_line(file, tmp_path, given):
    line = refused(ConfigError, train.train, file, given)
    assert re.search(REJECTED, line) and "\n" not in line and len(line) < 400
    assert not (tmp_path / "run").exists()


def test_a_dry_run_and_other_layers_need_none(file, monkeypatch):
    train.train(file, dry_run=True)
    for setting in ("megatron.transformer_impl=local", "megatron.spec=[json, loads]"):
        jobs.build_command(jobs.load(file, [setting]))
    monkeypatch.setattr(jobs, "choose_device", lambda *_: ("cpu", {}))
    jobs.build_command(jobs.load(file))
