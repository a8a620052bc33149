"""Kills a job on two ranks in its saves, at random moments, and starts it again each time:
`python -m tests.megatron.kills --kills 20 [--async-save]`.

A restart resumes if it begins right after the checkpoint that the tracker names when the job is
killed, and if its losses are those of an undisturbed run, step for step, to its end.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from cp_ring.megatron.newest_checkpoint import TRACKER
from tests.megatron import worker
from tests.megatron.launch import RING, TINY, fork, trace

RANKS, INTERVAL, STEPS = 2, 2, 6
SAVE_S = 0.6  # a save takes about half of it
ASYNC = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]


@dataclass
class Kill:
    """A kill of `rank`, or of all ranks (-1), `delay` seconds after the save of `step` has begun.

    resumed: the step of the checkpoint that the restart began with; problem: what went wrong.
    """

    rank: int
    step: int
    delay: float
    resumed: int = -1
    problem: str = ""


def rank(number, ranks, port, kill, saves, *job):
    """As `worker.rank`, with the kill planted."""
    if kill is not None and kill.rank in (number, -1):
        threading.Thread(target=_die, args=(kill, saves), daemon=True).start()
    worker.rank(number, ranks, port, *job)


def _die(kill, saves):
    while not (saves / f"iter_{kill.step:07d}").exists():
        time.sleep(0.001)
    time.sleep(kill.delay)
    os.kill(os.getpid(), signal.SIGKILL)


def run(folder, kills, chance, flags):
    """Kills `kills` jobs once each, and tells how each went on."""
    _, straight, _ = _train(folder, "straight", flags)
    outcomes = []
    for number in range(kills):
        kill = Kill(
            rank=chance.choice([-1, *range(RANKS)]),
            step=INTERVAL * chance.randint(1, 2),
            delay=chance.random() * SAVE_S,
        )
        outcomes.append(kill)
        saves = folder / f"saves{number}"
        code, _, log = _train(folder, f"killed{number}", flags, kill, saves)
        if code != -signal.SIGKILL:
            kill.problem = f"the job ended with {code} before it was killed:\n{log}"
            continue
        named = _tracked(saves)
        code, losses, log = _train(folder, f"again{number}", flags, None, saves)
        kill.resumed = min(losses, default=STEPS + 1) - 1
        if code or sorted(losses) != list(range(kill.resumed + 1, STEPS + 1)):
            kill.problem = f"the restart ended with {code} after the steps {[*losses]}:\n{log}"
        elif named is not None and kill.resumed != named:
            kill.problem = f"the restart began after step {kill.resumed}, not {named}"
        elif wrong := {
            step: (loss, straight[step])
            for step, loss in losses.items()
            if abs(loss - straight[step]) > 1e-6 * abs(straight[step])
        }:
            kill.problem = f"the losses of the restart are others: {wrong}"
    return outcomes


def _tracked(saves):
    """The step that the tracker names, 0 without a tracker; None where a kill has emptied it."""
    try:
        word = (saves / TRACKER).read_text()
    except FileNotFoundError:
        return 0
    return int(word) if word else None


def _train(folder, name, flags, kill=None, saves=None):
    """Exit code, loss of each step and end of the output of a job."""
    argv = [*TINY, *RING, *flags]
    argv += ["--train-iters", str(STEPS)]
    if saves is not None:
        argv += ["--save", str(saves), "--load", str(saves), "--save-interval", str(INTERVAL)]
    job = {"name": name, "argv": argv, "fault": "", "data": ""}
    log = folder / f"{name}.log"
    code = fork(RANKS, (kill, saves, job, folder, log), target=rank)
    losses = {
        step: line["loss"] for step, line in trace(folder, name).items() if line["loss"] is not None
    }
    return code, losses, log.read_text()[-3000:]


def main():
    """Prints a line for each kill; exit code 1 unless each job has resumed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    given = parser.parse_args()
    flags = ASYNC if given.async_save else []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(Path(folder), given.kills, random.Random(given.seed), flags)
    for kill in outcomes:
        print(kill)
    resumed = sum(not kill.problem for kill in outcomes)
    before = sum(kill.resumed < kill.step for kill in outcomes)
    print(f"{resumed} of {len(outcomes)} resumed, {before} of them from the checkpoint before")
    sys.exit(resumed < len(outcomes))


if __name__ == "__main__":
    main()
