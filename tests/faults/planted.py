"""What goes wrong: a rank is killed, stopped or slow, the disk fills up, a folder goes; at a step
or at a file operation.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cp_ring.megatron.checkpoints import lock
from tests.megatron import worker

_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR
EVERY = -1
BEAT_S, STALE_S = 0.5, 20.0  # of jobs on hosts that know nothing of one another


def rank(number: int, ranks: int, port: int, fault: dict, *job) -> None:
    """As `worker.rank`, with the fault {"what", "rank", and "step", "operation" or "verified",
    "delay"} planted in that rank.

    rank: its number, or `EVERY`. operation: counts what writes or, with "reading", what opens a
    file, or, with "renaming", what
    gives a file or folder another name, as only a commit does; `delay` seconds later it happens,
    wherever the rank is then.
    verified: it happens between the check of a checkpoint and its loading. host: the rank believes
    to be on a machine so called.
    """
    if "host" in fault:
        elsewhere(fault["host"])
    if fault.get("rank") in (number, EVERY):
        what = WHAT[fault["what"]]
        (
            at_step
            if "step" in fault
            else after_verification
            if "verified" in fault
            else at_operation
        )(fault, what)
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
    """Runs `what` just before the rank's n-th operation on the checkpoints: making, writing,
    renaming or removing a file.
    """
    left = [fault["operation"]]

    def hook(event, args):
        if event not in _OPERATIONS or fault["saves"] not in str(args[0]):
            return
        if event == "open" and bool((args[2] or 0) & _WRITING) == fault.get("reading", False):
            return
        if fault.get("renaming") and event != "os.rename":
            return
        left[0] -= 1
        if left[0] == 0 and "delay" in fault:
            threading.Timer(fault["delay"], what, [fault]).start()
        elif left[0] == 0:
            what(fault)

    sys.addaudithook(hook)


def after_verification(fault: dict, what) -> None:
    """Runs `what` once the ranks have agreed on a checkpoint that they have verified."""
    from cp_ring.megatron.checkpoints import loading

    agree = loading.agree_on_iteration

    def agree_then(args):
        chosen = agree(args)
        what(fault)
        return chosen

    loading.agree_on_iteration = agree_then


def elsewhere(host: str) -> None:
    """Makes this process one of another machine, of which nothing is known here but its lock;
    silence is noticed sooner.
    """
    lock._machine = lambda: host
    lock.BEAT_S, lock.STALE_S = BEAT_S, STALE_S


def kill(fault: dict) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(fault: dict) -> None:
    """Fills the disk that holds the checkpoints, but for the "spare" bytes; without them to the
    last byte.
    """
    filler = Path(fault["disk"]) / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    if fault.get("spare"):
        os.truncate(filler, max(filler.stat().st_size - fault["spare"], 0))


def freeze(fault: dict) -> None:
    """Makes the disk read-only, once nobody is writing."""
    while subprocess.run(
        ["mount", "-o", "remount,ro", fault["disk"]], capture_output=True
    ).returncode:
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


def swap(fault: dict) -> None:
    """Another checkpoint's file is put, by a rename, where the one of the same name was; or a bit
    of it is flipped in place.
    """
    victim, other = Path(fault["file"]), Path(fault["by"])
    if fault["in_place"]:
        with victim.open("r+b") as file:
            file.seek(fault["byte"])
            (old,) = file.read(1)
            file.seek(fault["byte"])
            file.write(bytes([old ^ 64]))
        return
    aside = victim.with_name(f".{victim.name}.swapped").resolve()
    outside = aside.parents[2] / aside.name
    shutil.copyfile(other, outside)
    os.replace(outside, victim)


WHAT = {
    "swap": swap,
    "kill": kill,
    "fill": fill,
    "freeze": freeze,
    "stop": stop,
    "linger": linger,
    "remove": remove,
}
