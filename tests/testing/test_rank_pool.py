"""Ranks are started again, once, where the fork server has died, and the reason is said."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rank_pool import LIMIT_S

PROGRAM = """
import multiprocessing as mp, os, signal, sys
from multiprocessing import forkserver
from tests.rank_pool import start

context = mp.get_context("forkserver")
killed = []

class Process(context.Process):
    def start(self):
        if len(killed) < int(sys.argv[1]):
            forkserver.ensure_running()
            killed.append(forkserver._forkserver._forkserver_pid)
            os.kill(killed[-1], signal.SIGKILL)
            raise EOFError
        super().start()

def work():
    print("worked", flush=True)

if __name__ == "__main__":
    context.set_forkserver_preload([])
    process = Process(target=work)
    start(process)
    process.join()
    sys.exit(process.exitcode)
"""


def run(folder, times):
    path = folder / "program.py"
    path.write_text(PROGRAM)
    command, root = [sys.executable, str(path), str(times)], str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_fork_server_that_died_is_started_again_once(tmp_path):
    once, twice = run(tmp_path, 1), run(tmp_path, 2)
    assert once.returncode == 0 and once.stdout == "worked\n", once.stderr
    assert once.stderr == "cp_ring: the fork server ended with signal 9; it is started again\n"
    assert twice.returncode == 1 and "EOFError" in twice.stderr and not twice.stdout
