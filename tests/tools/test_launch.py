"""What `cp-ring train` makes of the ranks' output, their endings, and of signals, with a small
program in place of a rank.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time

import pytest

from cp_ring.tools import train
from cp_ring.tools.train import for_people
from tests.rank_pool import LIMIT_S

STEP = (
    " [2026-11-25 21:09:26] iteration       22/      60 | consumed samples:           44 | elapsed "
    "time per iteration (ms): 96.9 | learning rate: 1.000000E-03 | global batch size:     2 | lm "
    "loss: 4.114914E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Command:
    """A command of `cp-ring train` whose ranks run `code`."""

    environment = {"OMP_NUM_THREADS": "1", "PET_SHUTDOWN_TIMEOUT": "600"}  # noqa: RUF012

    def __init__(self, folder, code, ranks):
        self.ranks, self.script = ranks, folder / "rank.py"
        self.script.write_text(
            f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"
        )

    def torchrun(self, *more):
        here = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(self.ranks)]
        return [*here, *more, str(self.script)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs ranks of a code; returns the exit code and the lines of the log."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    launcher = logging.getLogger("torch.distributed")
    before = launcher.handlers, launcher.propagate
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def run(code, ranks=1, log=tmp_path / "train.log"):
        ended = train.run(Command(tmp_path, code, ranks), log)
        return ended, log.read_text().splitlines() if log.is_file() else []

    yield run
    launcher.handlers, launcher.propagate = before
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.ci
def test_the_console_has_what_a_person_needs_and_the_log_has_all(run, capfd):
    code = f"""
print("hidden_size ... 32\\ncp_ring: certificate: passed")
print("WARNING:cp_ring.kernels:slow\\nnoise", file=sys.stderr)
if rank:
    print({STEP!r} + "\\n validation loss at iteration 8 on validation set | lm loss value: 1.5 | ")
    sys.stdout.write("no end")
"""
    ended, log = run(code, ranks=2)
    out, err = capfd.readouterr()
    assert ended == 0
    assert sorted(out.splitlines()) == sorted([
        "cp_ring: certificate: passed",
        "step 22/60 | ms 96.9 | lm loss 4.1149 | grad norm 1.234",
        "validation loss at iteration 8 on validation set | lm loss value: 1.5",
    ])  # fmt: skip
    assert err.splitlines() == ["WARNING:cp_ring.kernels:slow"]
    for line in ("[rank 0] hidden_size ... 32", "[rank 1] hidden_size ... 32", "[rank 0] noise",
                 f"[rank 1] {STEP}", "[rank 1] no end"):  # fmt: skip
        assert line in log, line


@pytest.mark.ci
@pytest.mark.parametrize(
    "end, code, ending",
    [
        ("raise ValueError('my own bug')", 1, "exit code 1"),
        ("os.kill(os.getpid(), 9)", 137, "signal 9"),
    ],
)
def test_a_rank_that_fails_is_one_line_and_the_exit_code(run, tmp_path, capfd, end, code, ending):
    ended, log = run(f"if rank: {end}\ntime.sleep({LIMIT_S})", ranks=2)
    *said, line = capfd.readouterr().err.splitlines()
    assert ended == code and said == ["ValueError: my own bug"] * (code == 1)
    assert line.startswith(f"cp_ring: error: rank 1 ended with {ending}; the output of all ranks ")
    assert line.endswith(f"{tmp_path}/train.log")
    assert ("[rank 1] Traceback (most recent call last):" in log) == (code == 1)


def test_a_rejection_by_all_ranks_is_their_line_alone(run, capfd):
    ended, _ = run("sys.exit(print('cp_ring: error: no', file=sys.stderr) or 2)", ranks=2)
    assert ended == 2 and capfd.readouterr().err == "cp_ring: error: no\n"


def test_ranks_that_print_a_line_at_the_same_time_are_one_line(tmp_path):
    others = []

    class Shown(io.StringIO):
        def write(self, text):
            if not others:
                others.append(threading.Thread(target=console.write, args=(line,)))
                others[0].start()
                others[0].join(0.2)  # it ends now only if it need not wait
            return super().write(text)

    line = "[rank 0] cp_ring: error: no"
    console = train.Console(tmp_path / "log", Shown())
    console.write(line)
    others[0].join()
    assert console.shown.getvalue() == "cp_ring: error: no\n"


def starting():
    """Whether torchrun still starts the ranks, which a signal would end at once."""
    frame, names = sys._current_frames()[threading.main_thread().ident], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "_initialize_workers" in names


def signals(log, *numbers):
    """Sends the signals to this process, each when the rank has written the next line."""

    def send():
        for count, number in enumerate(numbers, start=1):
            end = time.monotonic() + LIMIT_S
            while time.monotonic() < end:
                time.sleep(0.05)
                written = log.is_file() and log.read_text().count("ready") >= count
                if written and not starting():
                    break
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


SAVES = """
def save(*_):
    print("saved")
    sys.exit(1)
signal.signal({number}, save)
print("ready")
for _ in range(6000): time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save_and_end(run, tmp_path, capfd, number):
    signals(tmp_path / "train.log", number)
    ended, log = run(SAVES.format(number=int(number)))
    assert ended == 128 + number and "[rank 0] saved" in log
    assert capfd.readouterr() == ("", "")


def test_a_second_ctrl_c_ends_the_ranks(run, tmp_path):
    """A rank that goes on after the first one, and a process below it."""
    pid = tmp_path / "pid"
    code = f"""
import subprocess
signal.signal(signal.SIGINT, lambda *_: print("ready again"))
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pid)!r}, "w").write(str(below.pid))
print("ready")
for _ in range(6000): time.sleep(0.1)
"""
    signals(tmp_path / "train.log", signal.SIGINT, signal.SIGINT)
    assert run(code)[0] == 128 + signal.SIGINT
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int(pid.read_text()), 0)
        with open(f"/proc/{pid.read_text()}/stat") as stat:  # nobody may have waited for it
            assert stat.read().split()[2] == "Z"


def test_a_full_disk_does_not_end_the_job(run, tmp_path, capfd):
    log = tmp_path / "full.log"
    log.symlink_to("/dev/full")
    assert run('print("cp_ring: one\\nnoise\\ncp_ring: two")', log=log)[0] == 0
    assert capfd.readouterr().out.splitlines() == ["cp_ring: one", "cp_ring: two"]


def test_lines_that_are_no_numbers_stay_readable():
    assert for_people(" iteration 3/ 9 | lm loss: nan | elapsed time per iteration (ms): x |") == (
        "step 3/9 | lm loss nan"
    )
