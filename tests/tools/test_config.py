"""The YAML file: mapping, overrides, packaged names, rejections in one line that names the key."""

import pytest
import yaml

from cp_ring.errors import ConfigError
from cp_ring.tools import job as config


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"megatron": {"train_iters": 3, "context_parallel_size": 2}}))
    return str(path)


def test_sections_and_defaults(file):
    job = config.load(file)
    assert job.megatron == {"train_iters": 3, "context_parallel_size": 2}
    assert job.ranks == 2
    assert job.launch.run_dir == "runs/job"
    assert job.cp_ring.enabled is False


@pytest.mark.parametrize(
    "override, read",
    [
        ("megatron.train_iters=120", lambda job: job.megatron["train_iters"] == 120),
        ("megatron.lr=1.0e-3", lambda job: job.megatron["lr"] == pytest.approx(1e-3)),
        ("megatron.swiglu=true", lambda job: job.megatron["swiglu"] is True),
        ("megatron.split=[9, 1]", lambda job: job.megatron["split"] == [9, 1]),
        ("megatron.save=a=b", lambda job: job.megatron["save"] == "a=b"),
        ("megatron.context_parallel_size=4", lambda job: job.ranks == 4),
        ("cp_ring.enabled=true", lambda job: job.cp_ring.enabled is True),
        ("data.path=some/folder", lambda job: job.data.path == "some/folder"),
        ("launch.run_dir=elsewhere", lambda job: job.launch.run_dir == "elsewhere"),
    ],
)
def test_override(file, override, read):
    assert read(config.load(file, [override]))


def test_later_override_wins(file):
    assert config.load(file, ["megatron.a=1", "megatron.a=2"]).megatron["a"] == 2


def test_packaged_configurations_by_name():
    assert config.load("quickstart").cp_ring.enabled is True
    with pytest.raises(ConfigError, match=r"nosuch: no such file.*quickstart"):
        config.load("nosuch")


def test_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    job = config.load(
        "quickstart",
        ["data.path=~/texts", "data.cache=~/cache", "launch.run_dir=~/run", "megatron.save=~/ck"],
    )
    assert str(job.checkpoints) == f"{tmp_path}/ck"
    assert (job.data.path, job.data.cache, job.launch.run_dir) == (
        f"{tmp_path}/texts",
        f"{tmp_path}/cache",
        f"{tmp_path}/run",
    )
