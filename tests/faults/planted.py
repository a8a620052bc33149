"""What goes wrong in a rank: it is killed, or the disk fills up, at a step or at the n-th operation on the checkpoints."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.megatron import worker

_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR


def rank(number: int, ranks: int, port: int, fault: dict, *job) -> None:
    """As `worker.rank`, with the fault {"what", "rank", and "step" with "delay", or "operation"} planted in that rank."""
    if fault and fault["rank"] == number:
        what = {"kill": kill, "fill": fill, "freeze": freeze}[fault["what"]]
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
        if event == "open" and not (args[2] or 0) & _WRITING:
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
