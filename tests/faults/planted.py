"""What goes wrong: a rank is killed, stopped or slow, the disk fills up, a folder goes; at a step or at a file operation."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.megatron import worker

_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR
EVERY = -1


def rank(number: int, ranks: int, port: int, fault: dict, *job) -> None:
    """As `worker.rank`, with the fault {"what", "rank", and "step" with "delay", or "operation"} planted in that rank.

    rank: its number, or `EVERY`. operation: counts what writes or, with "reading", what opens a file.
    """
    if fault and fault["rank"] in (number, EVERY):
        what = WHAT[fault["what"]]
        at_step(fault, what) if "step" in fault else at_operation(fault, what)
    worker.rank(number, ranks, port, *job)


def at_step(fault: dict, what) -> None:
    """Runs `what` `delay` seconds after the rank has begun `step`."""

    def watch():
        from cp_ring.megatron import compat

        while compat.training_step() < fault["step"]:
            time.sleep(0.001)
        time.sleep(fault["delay"])
        what(fault)

    threading.Thread(target=watch, daemon=True).start()


def at_operation(fault: dict, what) -> None:
    """Runs `what` just before the rank's n-th operation on the checkpoints: making, writing, renaming or removing a file."""
    left = [fault["operation"]]

    def hook(event, args):
        if event not in _OPERATIONS or fault["saves"] not in str(args[0]):
            return
        if event == "open" and bool((args[2] or 0) & _WRITING) == fault.get("reading", False):
            return
        left[0] -= 1
        if left[0] == 0:
            what(fault)

    sys.addaudithook(hook)


def kill(fault: dict) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(fault: dict) -> None:
    """Fills the disk that holds the checkpoints to the last byte."""
    with (Path(fault["disk"]) / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass


def freeze(fault: dict) -> None:
    """Makes the disk read-only, once nobody is writing."""
    while subprocess.run(["mount", "-o", "remount,ro", fault["disk"]], capture_output=True).returncode:
        time.sleep(0.01)


def stop(fault: dict) -> None:
    """Stops the process; with "seconds" it goes on after so long, as a suspended job does."""
    if "seconds" in fault:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {fault['seconds']}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def linger(fault: dict) -> None:
    """As on a slow disk."""
    time.sleep(fault["seconds"])


def remove(fault: dict) -> None:
    """Removes the folder of the run with all that is in it."""
    shutil.rmtree(fault["folder"], ignore_errors=True)


WHAT = {"kill": kill, "fill": fill, "freeze": freeze, "stop": stop, "linger": linger, "remove": remove}
