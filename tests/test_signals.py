"""Signals that ask a job to stop: remembered before torch is loaded, obeyed by Megatron's own
--exit-signal-handler.
"""

import os
import signal
import subprocess
import sys

import pytest

from cp_ring import patches, signals
from cp_ring.testing.rank_pool import LIMIT_S

EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands down that it is ignored
sys.argv = ["pretrain_gpt", *{flags}]
import cp_ring.pretrain_gpt as entry

def install(argv):
    assert "torch" not in sys.modules
    os.kill(os.getpid(), signal.{signal})
    raise SystemExit(0 if entry.signals.received() is signal.{signal} else 3)

entry.install = install
entry.main()
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_rank_listens_before_it_loads_torch(name, asked):
    flags = ["--exit-signal-handler"] if asked else []
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(flags=flags, signal=name)], timeout=LIMIT_S
    )
    assert done.returncode == (0 if asked else -getattr(signal, name))


def test_children_and_the_end_of_the_process_are_safe_too():
    """A spawned child has no handler, and Python takes its own down before it ends."""
    code = """
import atexit, os, signal, subprocess, sys
from cp_ring import signals

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGUSR1)

os.setpgid(0, 0)
signals.listen()
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(1)"], stdout=subprocess.PIPE)
child.stdout.readline()
os.killpg(0, signal.SIGUSR1)
assert signals.received() is signal.SIGUSR1
code = child.wait()
sys.last = Last()
sys.exit(code)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_ends_the_process(second):
    """torchrun passes on the first Ctrl-C as SIGINT and, at the second one, sends SIGTERM."""
    code = f"""
import os, signal
from cp_ring import signals

signals.listen()
os.kill(os.getpid(), signal.SIGINT)
assert signals.received() is signal.SIGINT
print("still here", flush=True)
os.kill(os.getpid(), signal.{second})
print("still here", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.stdout == "still here\n" and done.returncode == -getattr(signal, second), (
        done.stderr
    )


@pytest.fixture
def handlers():
    saved = {number: signal.getsignal(number) for number in (*signals.ASKING, signal.SIGUSR2)}
    yield
    signals._received.clear()
    signal.sigtimedwait(signals.ASKING, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKING)
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_megatron_obeys_each_signal_and_early_ones(handlers, number, capsys):
    from megatron.training import global_vars

    signals.listen()
    if number != signal.SIGUSR2:  # USR2 is listened to as --exit-signal alone
        os.kill(os.getpid(), number)
    patch = patches.get("exit_signal")
    patch.apply()
    try:
        handler = global_vars.DistributedSignalHandler(signal.SIGUSR2).__enter__()
        if number == signal.SIGUSR2:
            assert not any(handler.signals_received())
            os.kill(os.getpid(), number)
        assert all(handler.signals_received())
        assert f"cp_ring: {number.name}: saving, then ending" in capsys.readouterr().out
    finally:
        patch.revert()


def test_without_the_patch_an_early_signal_is_forgotten(handlers):
    from megatron.training import global_vars

    signals.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    handler = global_vars.DistributedSignalHandler(signal.SIGUSR1).__enter__()
    assert not any(handler.signals_received())
