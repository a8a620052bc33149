"""What `cp-ring train` makes of the ranks' output, their endings, and of signals, with a stand-in
for torchrun.
"""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from cp_ring.tools.train import KILLED, TERMINATED, Launch, for_people, new_log
from tests.rank_pool import LIMIT_S

STEP = (
    " [2026-11-25 21:09:26] iteration       22/      60 | consumed samples:           44 | elapsed "
    "time per iteration (ms): 96.9 | learning rate: 1.000000E-03 | global batch size:     2 | lm "
    "loss: 4.114914E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
)
TORCHRUN = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--log-dir") + 1])
def write(rank, stdout="", stderr=""):
    place = folder / "none" / "attempt_0" / str(rank)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        with (place / f"{name}.log").open("a") as file:
            file.write(text)
"""
FAILED = """
print("Root Cause (first observed failure):\\n[0]:\\n  time      : now\\n  rank      : 1 (local_rank: 1)"
      "\\n  exitcode  : {code} (pid: 1)\\n  error_file: <N/A>")
sys.exit(1)
"""


class Command:
    """A command of `cp-ring train` that runs `code` in place of torchrun."""

    environment = {"A": "b"}  # noqa: RUF012

    def __init__(self, code):
        self.code = TORCHRUN + code

    def words(self, *more):
        return [sys.executable, "-c", self.code, *more]


def run(folder, code, **settings):
    launch = Launch(new_log(folder), **settings)
    return launch.run(Command(code)), launch.log.read_text().splitlines()


def test_the_console_has_what_a_person_needs_and_the_log_has_all(tmp_path, capfd):
    code = f"""
write(0, "hidden_size ... 32\\ncp_ring: certificate: passed\\nhalf a ", "WARNING:cp_ring.kernels:slow\\nnoise\\n")
time.sleep(0.3)
write(0, "line\\n")
write(1, {STEP + chr(10)!r} + " validation loss at iteration 8 on validation set | lm loss value: 1.5 | \\nno end")
print("a line of torch's launcher")
"""
    ended, log = run(tmp_path, code, tokens=4096)
    out, err = capfd.readouterr()
    assert ended == 0
    assert sorted(out.splitlines()) == sorted([
        "cp_ring: certificate: passed",
        "step 22/60 | 42,270 tokens/s | lm loss 4.1149 | grad norm 1.2340",
        "validation loss at iteration 8 on validation set | lm loss value: 1.5",
    ])  # fmt: skip
    assert err.splitlines() == ["WARNING:cp_ring.kernels:slow"]
    for line in ("[rank 0] hidden_size ... 32", "[rank 0] half a line", "[rank 0] noise",
                 f"[rank 1] {STEP}", "[rank 1] no end", "a line of torch's launcher"):  # fmt: skip
        assert line in log, line


@pytest.mark.parametrize(("code", "ending"), [(1, "exit code 1"), (-9, "signal 9")])
def test_a_rank_that_fails_is_one_line_and_the_exit_code(tmp_path, capfd, code, ending):
    write = 'write(1, "", "Traceback ...\\n[rank1]: ValueError: my own bug\\n")'
    ended, log = run(tmp_path, write + FAILED.format(code=code))
    (line,) = capfd.readouterr().err.splitlines()
    assert ended == (code if code > 0 else 128 - code)
    assert line.startswith(f"cp_ring: error: rank 1 ended with {ending} (ValueError: my own bug); ")
    assert f"the output of all ranks is in {tmp_path}/logs/train-" in line
    assert "[rank 1] Traceback ..." in log


def test_a_launcher_that_fails_is_one_line(tmp_path, capfd):
    ended, _ = run(tmp_path, "sys.exit(3)")
    assert ended == 3
    assert (
        "cp_ring: error: torchrun ended with exit code 3; its output is in"
        in capfd.readouterr().err
    )


def signals(log, *numbers):
    """Sends the signals to this process, each when the stand-in has written the next line."""

    def send():
        for count, number in enumerate(numbers, start=1):
            end = time.monotonic() + LIMIT_S
            while log.read_text().count("ready") < count and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


SAVES = """
def save(*_):
    write(0, "saved\\n")
    sys.exit(1)
signal.signal(signal.SIGTERM, {handler})
write(0, "ready\\n")
for _ in range(6000): time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save_and_end(tmp_path, capfd, number):
    launch = Launch(new_log(tmp_path))
    signals(launch.log, number)
    before = signal.getsignal(number)
    assert launch.run(Command(SAVES.format(handler="save"))) == TERMINATED
    assert "[rank 0] saved" in launch.log.read_text() and signal.getsignal(number) is before
    out, err = capfd.readouterr()
    assert ("Ctrl-C: the job saves and then ends; Ctrl-C again" in out) == (number == signal.SIGINT)
    assert not err


def test_a_second_ctrl_c_kills_the_ranks(tmp_path, capfd):
    """A rank that does not react to SIGTERM, below the launcher."""
    pid = tmp_path / "pid"
    below = (
        "import signal, sys, os, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    code = f"""
import os, subprocess
def told(*_): write(0, "ready again\\n")
signal.signal(signal.SIGTERM, told)
subprocess.Popen([sys.executable, "-c", {below!r}], start_new_session=True)
while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read(): time.sleep(0.05)
write(0, "ready\\n")
for _ in range(6000): time.sleep(0.1)
"""
    launch = Launch(new_log(tmp_path))
    signals(launch.log, signal.SIGINT, signal.SIGINT)
    assert launch.run(Command(code)) == KILLED
    assert "Ctrl-C again: the ranks are killed" in capfd.readouterr().out
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
        with open(f"/proc/{pid.read_text()}/stat") as stat:  # nobody may have waited for it
            assert stat.read().split()[2] == "Z"


def test_a_log_on_a_full_disk_warns_once_and_the_console_goes_on(tmp_path, capfd):
    log = tmp_path / "train.log"
    log.symlink_to("/dev/full")
    launch = Launch(log)
    launch._ending = lambda code: (code, "")  # which reads the log
    assert launch.run(Command('write(0, "cp_ring: one\\nnoise\\ncp_ring: two\\n")')) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"cp_ring: {log} cannot be written; the job goes on: No space left on device",
        "cp_ring: one",
        "cp_ring: two",
    ]


def test_lines_that_are_no_numbers_stay_readable():
    assert for_people(" iteration 3/ 9 | lm loss: nan | elapsed time per iteration (ms): x |") == (
        "step 3/9 | lm loss nan"
    )
    assert for_people("number of layers 4") is None
