"""`cp-ring compare`: which jobs are compared, and what is shown of them."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.cli import app
from cp_ring.tools.job import command_line
from cp_ring.tools.job import compare_jobs as compare
from cp_ring.tools.job import job_config as config
from tests.tools.slurm.job import TINY


@pytest.fixture
def job(tmp_path, monkeypatch):
    path = tmp_path / "job.yaml"
    run_dir = str(tmp_path / "run")
    path.write_text(
        yaml.safe_dump(
            TINY
            | {
                "launch": {"device": "cpu", "run_dir": run_dir},
                "parallel": {"context_parallel_size": 2},
            }
        )
    )
    return path


def trained(path, ends=()):
    """What a job leaves behind; the one with cp_ring is half as fast, and its losses are a little
    higher.
    """
    job = config.load(str(path))
    ring = job.parallel.context_parallel_size > 1
    for step in range(1, job.megatron["train_iters"] + 1):
        values = {
            "lm loss": 4.0 / step * (1.0 + 1e-6 * ring),
            "gradient norm": 1.0,
            "learning rate": 1e-3,
            "memory": (2 - ring) << 30,
        }
        timing = (
            {"timing": {"exposed_share": 0.25, "exposed_ms": 5.0}} if ring and step == 2 else {}
        )
        progress.append(
            str(job.launch.run_dir),
            step,
            {**values, "tokens per second": 100.0 * (2 - ring) * (step > 1), **timing},
        )
    return 0


def test_jobs_and_table(job, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "train", trained)
    result = CliRunner().invoke(app, ["compare", str(job), "--steps", "3", "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["difference"] == {"lm loss": pytest.approx(1e-6), "gradient norm": 0.0}
    ring, baseline = found["cp_ring"], found["baseline"]
    assert (ring["ranks"], ring["tokens_per_s"], ring["exposed_share"], ring["memory_bytes"]) == (
        2,
        100.0,
        0.25,
        1 << 30,
    )
    assert (baseline["ranks"], baseline["tokens_per_s"], baseline["exposed_share"]) == (
        1,
        200.0,
        None,
    )
    assert baseline["name"] == "stock, context parallel size 1" and baseline["because"] == [
        "stock context parallelism needs GPUs"
    ]
    folder = tmp_path / "run-compare"
    one, other = (config.load(str(folder / f"{name}.yaml")) for name in ("cp_ring", "baseline"))
    assert one.cp_ring.enabled and one.cp_ring.timing == 1 and not other.cp_ring.enabled
    assert (one.megatron["train_iters"], one.megatron["save"]) == (
        3,
        None,
    ) and one.launch.run_dir == folder / "cp_ring"
    shown = (
        CliRunner()
        .invoke(app, ["compare", str(job), "--steps", "3", "--out", str(tmp_path / "again")])
        .stdout
    )
    for words in (
        "stock, context parallel",
        "25.0%",
        "1e-06",
        "stock context parallelism needs GPUs",
        "gradient norm",
    ):
        assert words in shown, shown
    with pytest.raises(ConfigError, match=r"--out .*run-compare: it is not empty"):
        compare.compare(str(job), [], 3, None, trained)
    for place in (job, job / "sub"):
        with pytest.raises(ConfigError, match=rf"--out {place}: cannot be made: "):
            compare.compare(str(job), [], 3, place, pytest.fail)


def test_stock_context_parallelism_is_preferred(job, monkeypatch):
    """Where there are GPUs and TransformerEngine's layers: the same size; else the reason why not."""
    monkeypatch.setattr(command_line, "choose_device", lambda *_: ("cuda", {}))
    monkeypatch.setattr(compare, "_rejection", lambda _: "")
    made = config.load(str(job))
    same = compare._baseline(made, 3, job.parent / "x")
    assert (
        same.name == "stock, context parallel size 2"
        and same.job.parallel.ranks == 2
        and not same.job.cp_ring.enabled
    )
    local = compare._baseline(
        config.load(str(job), ["megatron.transformer_impl=local"]), 3, job.parent / "x"
    )
    assert (
        local.job.parallel.ranks == 1 and "transformer_impl transformer_engine" in local.reasons[0]
    )
    monkeypatch.setattr(compare, "_rejection", lambda job: "" if job.cp_ring.enabled else "no")
    ring = compare._baseline(made, 3, job.parent / "x")
    assert (
        ring.name == "cp_ring, context parallel size 1"
        and ring.reasons[0] == "stock context parallelism: no"
    )
    monkeypatch.setattr(compare, "_rejection", lambda _: "no")
    with pytest.raises(ConfigError, match="there is nothing to compare with"):
        compare._baseline(made, 3, job.parent / "x")


def test_bad_input_and_failures_are_one_line(job):
    def run(*overrides, steps=3, run=trained):
        compare.compare(str(job), overrides, steps, None, run)

    with pytest.raises(
        ConfigError,
        match=r"compare needs parallel.context_parallel_size above 1, not 1",
    ):
        run("parallel.context_parallel_size=1")
    with pytest.raises(ConfigError, match="--steps 1: it must be at least 2"):
        run(steps=1)
    with pytest.raises(ConfigError, match=r"cp_ring.yaml ended with exit code 7; its output is in"):
        run(run=lambda _: 7)


@pytest.mark.slow
def test_a_real_job(job, tmp_path):
    result = CliRunner().invoke(app, ["compare", str(job), "--steps", "4", "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["difference"]["lm loss"] < 1e-5 and found["difference"]["gradient norm"] < 1e-3
    assert all(
        step["learning rate"] > 0
        for side in ("cp_ring", "baseline")
        for step in found[side]["trace"]
    )
    assert found["cp_ring"]["exposed_ms"] >= 0 and len(found["baseline"]["trace"]) == 4
