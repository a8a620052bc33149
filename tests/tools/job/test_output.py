"""What becomes of the lines of ranks: the log has all of them, the console those that a person
needs, errors come at the end.
"""

import os

import pytest

from cp_ring.errors import ConfigError
from cp_ring.observe import progress
from cp_ring.tools.job.output import RankOutput, log_path

STEP = {
    "lm loss": 2.5,
    progress.GRADIENT_NORM: 0.5,
    progress.LEARNING_RATE: 1e-3,
    "tokens per second": 1234.5,
    "memory": 2**30,
}


def write(output, attempt, rank, stdout="", stderr=""):
    folder = output.folder / "job_x" / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stdout.log").write_text(stdout)
    (folder / "stderr.log").write_text(stderr)


def run(tmp_path, **settings):
    """Two ranks of the second node, which torch's launcher starts twice."""
    progress.append(str(tmp_path), 7, STEP)  # of an earlier run
    output = RankOutput(
        log_path(tmp_path, "train"), run_dir=tmp_path, first_rank=2, steps=10, **settings
    )
    with output.following():
        write(
            output,
            0,
            0,
            "hidden_size ... 32\ncp_ring: certificate: passed\n",
            "WARNING:cp_ring.kernels:slow\nnoise\nno end",
        )
        write(
            output,
            0,
            1,
            stderr="cp_ring: watchdog: stuck\ncp_ring: error: bad flag\n  File x\nValueError: bad\n",
        )
        write(
            output,
            1,
            0,
            " validation loss at iteration 8 on validation set | lm loss value: 1.5 | \n",
        )
        with (tmp_path / "steps.jsonl").open("a") as torn:
            torn.write('{"step": 8, "lm\n')
        progress.append(str(tmp_path), 8, {**STEP, progress.WAITED: 0.0125})
    return output


QUIET = [
    "cp_ring: certificate: passed",
    "cp_ring: the ranks are started again",
    "validation loss at iteration 8 on validation set | lm loss value: 1.5",
    "step 8/10 | lm loss 2.5000 | 1,234 tokens/s | 1.00 GiB per rank | waited 12.5 ms for plans",
]


def test_console_and_log(tmp_path, capfd):
    output = run(tmp_path)
    out, err = capfd.readouterr()
    # steps come from another file: they have no order among the ranks' lines
    lines, step = out.splitlines(), QUIET[-1]
    assert [line for line in lines if line != step] == QUIET[:-1] and lines.count(step) == 1
    assert err.splitlines() == ["WARNING:cp_ring.kernels:slow", "cp_ring: watchdog: stuck"]
    assert list(output.errors) == ["cp_ring: error: bad flag"] and output.exceptions == {
        3: "ValueError: bad"
    }
    log = output.log.read_text().splitlines()
    for line in (
        "[rank 2] hidden_size ... 32",
        "[rank 2] no end",
        "[rank 3]   File x",
        "[rank 3] cp_ring: error: bad flag",
        QUIET[-1],
    ):
        assert line in log, line
    assert not output.folder.exists()


def test_verbose(tmp_path, capfd):
    output = run(tmp_path, verbose=True)
    out, err = capfd.readouterr()
    assert "hidden_size ... 32" in out.splitlines() and set(QUIET[:2] + QUIET[3:]) <= set(
        out.splitlines()
    )
    assert {"noise", "no end", "  File x", "ValueError: bad"} <= set(err.splitlines())
    assert list(output.errors) == ["cp_ring: error: bad flag"] and "bad flag" not in err


@pytest.mark.parametrize("stream", [1, 2])
def test_what_the_launcher_prints_goes_to_the_log(tmp_path, capfd, stream):
    output = RankOutput(log_path(tmp_path, "train"), run_dir=tmp_path)
    with output.following():
        os.write(stream, b"a line of torch's launcher\n")
    os.write(stream, b"after it\n")
    assert "".join(capfd.readouterr()) == "after it\n"
    assert "a line of torch's launcher" in output.log.read_text()


def test_a_log_on_a_full_disk_warns_once_and_the_console_goes_on(tmp_path, capfd):
    log = tmp_path / "logs" / "train.log"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    output = RankOutput(log, run_dir=tmp_path)
    with output.following():
        print("a line of torch's launcher")  # flushing it when the block ends fails
        write(output, 0, 0, "cp_ring: one\nnoise\ncp_ring: two\n")
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if "launcher" not in line] == [
        "cp_ring: one",
        "cp_ring: two",
    ]
    assert err.splitlines() == [
        f"cp_ring: {log} cannot be written; the job goes on: No space left on device"
    ]


def test_two_starts_in_one_second_have_a_log_each(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20261122-040000")
    assert [log_path(tmp_path, "train").name for _ in range(2)] == [
        "train-20261122-040000.log",
        "train-20261122-040000-1.log",
    ]


def test_a_log_in_the_way_of_the_launchers_files_is_one_line(tmp_path):
    output = RankOutput(log_path(tmp_path, "train"), run_dir=tmp_path)
    output.folder.mkdir()
    with pytest.raises(ConfigError, match=r"launch.run_dir .*: File exists"), output.following():
        pass
