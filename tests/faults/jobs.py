"""Runs of one tiny training job on two ranks, with and without a fault, and what they leave."""

import json
import random
from pathlib import Path

from cp_ring.megatron.checkpoints import last_good
from tests.faults import planted
from tests.megatron.launch import TINY, fork

RANKS, INTERVAL = 2, 3
SAVE_S = 0.5  # about what a save and a load take
ASYNC = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]


class Runs:
    """Runs of one job in `folder`, each resuming from what the last has left in `saves`.

    straight: loss of each step of an undisturbed run.
    """

    def __init__(
        self, folder: Path, steps: int, saves: Path | None = None, flags: tuple[str, ...] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.steps, self.saves = folder, steps, saves or folder / "saves"
        self.flags = ["--cp-ring", "--cp-ring-cpu", "--train-iters", str(steps), *flags]
        self.count = 0

    def run(
        self,
        fault: dict | None = None,
        until: int | None = None,
        save: bool = True,
        ranks: int = RANKS,
        log: Path | None = None,
    ) -> tuple[int, dict[int, float]]:
        """Exit code and loss of each step, on `ranks` ranks; their output goes to `log`."""
        self.count += 1
        name, log = f"run{self.count}", log or self.folder / f"run{self.count}.log"
        argv = [*TINY, *self.flags, "--context-parallel-size", str(ranks)]
        if save:
            argv += [
                "--save",
                str(self.saves),
                "--load",
                str(self.saves),
                "--save-interval",
                str(INTERVAL),
            ]
        if until:
            argv += ["--exit-interval", str(until)]
        job = {"name": name, "argv": argv, "fault": "", "data": ""}
        planned = {"saves": str(self.saves)} | fault if fault else {}
        code = fork(ranks, (planned, job, self.folder, log), target=planted.rank)
        return code, self.losses(name)

    def losses(self, name: str) -> dict[int, float]:
        return {
            line["step"]: line["loss"] for line in self._lines(name) if line.get("loss") is not None
        }

    def rejection(self, name: str) -> str:
        """Why a job ended, as one of its ranks told; "" for none."""
        return next((line["rejected"] for line in self._lines(name) if "rejected" in line), "")

    def _lines(self, name: str) -> list[dict]:
        return [
            json.loads(line)
            for path in sorted(self.folder.glob(f"{name}.*.jsonl"))
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]

    def good(self) -> int:
        """The step of the last good checkpoint; 0 if there is none."""
        return last_good(self.saves) or 0


def same(losses: dict[int, float], straight: dict[int, float], tolerance: float = 1e-6) -> bool:
    """Whether the losses of these steps are those of the undisturbed run."""
    return all(
        abs(loss - straight[step]) <= tolerance * abs(straight[step])
        for step, loss in losses.items()
    )


def resumed_well(
    losses: dict[int, float], good: int, straight: dict[int, float], tolerance: float = 1e-6
) -> bool:
    """Whether a run went on right after step `good`, without a gap, as the undisturbed run did."""
    return (
        bool(losses)
        and sorted(losses) == list(range(good + 1, max(losses) + 1))
        and same(losses, straight, tolerance)
    )


def random_kill(kind: str, good: int, chance: random.Random) -> dict:
    """A kill of one rank: at a step after `good`, or at an operation on the files of one of the
    next saves.
    """
    if kind == "asynchronous save":  # rank 1 leaves its files to another process
        return {"what": "kill", "rank": 0, "operation": chance.randint(1, 20)}
    if kind == "moment of an asynchronous save":
        return {
            "what": "kill",
            "rank": 0,
            "operation": chance.randint(1, 4),
            "delay": chance.random() * SAVE_S,
        }
    victim = chance.randrange(RANKS)
    if kind == "moment of a save":
        return {
            "what": "kill",
            "rank": victim,
            "operation": chance.randint(1, 4),
            "delay": chance.random() * SAVE_S,
        }
    if kind == "commit":
        return {
            "what": "kill",
            "rank": 0,
            "renaming": True,
            "operation": chance.randint(1, 8),
            "delay": chance.random() * 0.02,
        }
    if kind == "step":
        return {
            "what": "kill",
            "rank": victim,
            "step": good + chance.randint(2, 2 * INTERVAL),
            "delay": chance.random() * 0.05,
        }
    return {
        "what": "kill",
        "rank": victim,
        "operation": chance.randint(1, 30 if victim == 0 else 4),
    }
