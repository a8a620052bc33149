"""The versions of megatron-core that are supported, and the one line for all others."""

from types import SimpleNamespace

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from launch.budget import ROOT
from tests.megatron.launch import environment
from tests.rank_pool import python
from tests.rings import refused


@pytest.mark.parametrize("version", ["0.18.2", "0.19.0", "0.19.7", "0.19.2+abc", "0.20.0+d98e8a6"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(compat, "megatron_version", lambda: version)
    assert compat.check_version() == version
    said = compat.development()
    assert ("tested at commit d98e8a6" in said) if version >= "0.20" else not said


@pytest.mark.parametrize("version", ["0.12.3", "0.17.1", "0.18.1", "0.21.0", "0.21.0rc1", "1.0"])
def test_rejected_in_one_line_that_names_the_range(monkeypatch, version):
    monkeypatch.setattr(compat, "megatron_version", lambda: version)
    line = refused(ConfigError, compat.check_version)
    wanted = f"needs megatron-core>=0.18.2,<0.21, but {version} is installed: pip install"
    assert wanted in line and "\n" not in line


def test_the_supported_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"megatron-core[training]{compat.SUPPORTED}"' in text


def test_a_job_is_rejected_before_anything_of_megatron_is_imported(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemExit('it was imported')")
    (core / "package_info.py").write_text("__version__ = '0.15.3'")
    found_first = environment() | {"PYTHONPATH": str(tmp_path)}
    done = python("-m", "cp_ring.pretrain_gpt", "--cp-ring", env=found_first)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cp_ring: error: ")]
    assert (
        "needs megatron-core>=0.18.2,<0.21, but 0.15.3 is installed" in line
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(
    "backend, named, wanted",
    [("nccl", [], ["cp"]), ("nccl", ["cp", "dp_cp"], ["cp", "dp_cp"]), ("gloo", [], [])],
)
def test_messages_of_the_ring_have_priority_over_attention(backend, named, wanted):
    from cp_ring.megatron.flags.resolve import prefer_messages

    args = SimpleNamespace(distributed_backend=backend, high_priority_stream_groups=named)
    prefer_messages(args)
    assert args.high_priority_stream_groups == wanted
