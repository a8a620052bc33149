"""The records of a run without Slurm."""

from cp_ring.tools.job import command_line, local_run, train
from cp_ring.tools.job import job_config as config


def test_no_record_holds_the_environment(tmp_path, monkeypatch):
    """Keys of services are passed in it."""
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-the-user")
    job = config.load(
        "quickstart", [f"launch.run_dir={tmp_path / 'run'}", "megatron.wandb_project=mine"]
    )
    train.record_job(job, None)
    local_run.begin(command_line.run_dir(job))
    texts = {
        path.name: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    assert (
        set(texts) == {"job.yaml", "launcher.json"} and "wandb_project: mine" in texts["job.yaml"]
    )
    assert not any("a-key-of-the-user" in text for text in texts.values())
