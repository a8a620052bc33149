"""Runs the fault campaign: `python -m tests.faults --rounds N [--json] [--only FAULT]`; exit code 1
unless all recovered.

Each entry is a fault: `rounds` of it; how often a restart `recovered`: it went on right after the
last good checkpoint with the losses of an undisturbed run, step for step, to 1e-6 (1e-5 at another
size), or the job went on by itself where it must; and `lost_steps`, how many steps after those
checkpoints had to be done again in all rounds together.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cp_ring.megatron.checkpoints import folders, lock, manifest
from cp_ring.observe import progress, watchdog
from tests.faults import planted
from tests.faults.jobs import ASYNC, INTERVAL, RANKS, SAVE_S, Runs, random_kill, resumed_well

STEPS = 4 * INTERVAL
HOP_TIMEOUT = 6  # seconds: longer than a tiny hop takes on a busy machine
Outcome = tuple[bool, int]  # recovered, lost steps
Losses = dict[int, float]


def killed(
    kind: str,
    flags: tuple[str, ...],
    rounds: int,
    folder: Path,
    straight: Losses,
    chance: random.Random,
) -> list[Outcome]:
    """A job that is killed and restarted until it is through, again and again until it has been
    killed `rounds` times.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < rounds:
        runs = Runs(folder / f"chain{len(outcomes)}", STEPS, flags=flags)
        good = 0
        pending: list[int] = []  # steps lost by kills that no run has recovered from so far
        while good < STEPS or pending:
            fault = (
                random_kill(kind, good, chance) if len(outcomes) + len(pending) < rounds else None
            )
            code, losses = runs.run(fault)
            if code not in (0, -signal.SIGKILL):
                log = (runs.folder / f"run{runs.count}.log").read_text()[-3000:]
                raise SystemExit(
                    f"{runs.folder}: run {runs.count} ended with {code}, though only {fault} was "
                    f"planted:\n{log}"
                )
            if losses or code == 0:  # else killed again before its first step, while it cleared up
                through = code == 0 and good == STEPS and not losses
                outcomes += [
                    (through or resumed_well(losses, good, straight), lost) for lost in pending
                ]
                pending = []
            reached, good = max(losses, default=good), runs.good()
            pending += [reached - good] if code else []
    return outcomes


def damages(saves: Path, chance: random.Random) -> list[tuple[str, Callable[[], object]]]:
    """What can happen to the newest checkpoint of `saves`, and to its tracker."""
    newest = folders.folder_of(saves, folders.published(saves)[-1])
    files = sorted(path for path in newest.iterdir() if path.is_file())
    victim = chance.choice([path for path in files if path.name != manifest.NAME])

    def flip() -> None:
        data = bytearray(victim.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        victim.write_bytes(data)

    other = folders.folder_of(saves, folders.published(saves)[-2]) / manifest.NAME
    return [
        (
            "truncated",
            lambda: victim.write_bytes(
                victim.read_bytes()[: chance.randrange(victim.stat().st_size)]
            ),
        ),
        ("flipped", flip),
        ("deleted", victim.unlink),
        ("empty tracker", lambda: (saves / folders.TRACKER).write_text("")),
        ("wrong manifest", lambda: (newest / manifest.NAME).write_bytes(other.read_bytes())),
    ]


def corrupted(rounds: int, folder: Path, straight: Losses, chance: random.Random) -> list[Outcome]:
    """A copy of a stopped job's checkpoints, damaged; each kind of damage in turn."""
    runs = Runs(folder / "base", STEPS)
    runs.run(until=3 * INTERVAL)
    outcomes = []
    for turn in range(rounds):
        again = Runs(folder / f"round{turn}", runs.steps)
        shutil.copytree(runs.saves, again.saves)
        kinds = damages(again.saves, chance)
        name, damage = kinds[turn % len(kinds)]
        damage()
        good = 3 * INTERVAL if name == "empty tracker" else 2 * INTERVAL
        code, losses = again.run()
        recovered = (
            code == 0
            and resumed_well(losses, good, straight)
            and max(losses) == runs.steps == again.good()
        )
        outcomes.append((recovered, 3 * INTERVAL - good))
    return outcomes


def swapped(rounds: int, folder: Path, straight: Losses, chance: random.Random) -> list[Outcome]:
    """A file of the newest checkpoint becomes another while a job loads it: right after it was
    verified, or at any moment.

    The job trains on from a whole checkpoint, or ends in one line; then a restart does.
    """
    base = Runs(folder / "base", STEPS)
    base.run(until=3 * INTERVAL)
    outcomes = []
    for turn in range(rounds):
        runs = Runs(folder / f"round{turn}", STEPS)
        shutil.copytree(base.saves, runs.saves)
        newest, other = (
            folders.folder_of(runs.saves, step) for step in (3 * INTERVAL, 2 * INTERVAL)
        )
        victim = chance.choice(sorted(newest.glob("*.distcp")))
        place = (
            {"verified": True}
            if turn % 2
            else {"operation": chance.randint(1, 12), "reading": True}
        )
        place |= {} if turn % 2 else {"delay": chance.random() * SAVE_S}
        fault = {
            "what": "swap",
            "rank": 0,
            "file": str(victim),
            "by": str(other / victim.name),
            "in_place": turn % 4 > 1,
        }
        code, losses = runs.run(fault | place | {"byte": chance.randrange(victim.stat().st_size)})
        log = (runs.folder / "run1.log").read_text()
        line = runs.rejection("run1")
        said = (
            code == 2
            and "Traceback" not in log
            and line.startswith("the checkpoint is not what was verified")
        )
        good = max(losses, default=0) == STEPS and any(
            resumed_well(losses, step * INTERVAL, straight) for step in (2, 3)
        )
        if not losses:
            code, losses = runs.run()
            good = said and resumed_well(losses, 2 * INTERVAL, straight)
        outcomes.append(
            (
                good and code == 0 and runs.good() == STEPS,
                INTERVAL if min(losses, default=0) <= 3 * INTERVAL else 0,
            )
        )
    return outcomes


def two_hosts(rounds: int, folder: Path, straight: Losses, chance: random.Random) -> list[Outcome]:
    """Two jobs of two hosts that share nothing but the folder: in turn the first lives, is killed,
    or is stopped for a while.

    While it lives the second is rejected. When it is gone or silent the second takes over, and the
    first, once it goes on, changes nothing any more.
    """
    outcomes = []
    for turn in range(rounds):
        first = Runs(folder / f"round{turn}", STEPS)
        second = Runs(folder / f"round{turn}" / "second", STEPS, saves=first.saves)
        outcomes.append(_TWO_HOSTS[turn % 3](first, second, straight, chance))
    return outcomes


def _first_lives(first: Runs, second: Runs, straight: Losses, chance: random.Random) -> Outcome:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first.run, {"host": "one"})
        _wait_for_lock(first, running)
        rejected, trained = second.run({"host": "two"})
        code, losses = running.result()
    good = (
        code == 0
        and resumed_well(losses, 0, straight)
        and first.good() == STEPS
        and _all_whole(first.saves)
    )
    return good and rejected == 2 and not trained, 0


def _first_is_killed(first: Runs, second: Runs, straight: Losses, chance: random.Random) -> Outcome:
    code, losses = first.run(random_kill("save", 0, chance) | {"host": "one"})
    reached, good = max(losses, default=0), first.good()
    again, rest = second.run({"host": "two"})
    through = code == 0 or (code == -signal.SIGKILL and resumed_well(rest, good, straight))
    return again == 0 and through and first.good() == STEPS and _all_whole(
        first.saves
    ), reached - good


def _first_is_stopped(
    first: Runs, second: Runs, straight: Losses, chance: random.Random
) -> Outcome:
    """At a random moment of a save, for longer than a lock lives: the first may wake before or
    after the second has ended.
    """
    seconds = planted.STALE_S * (1.5 + 3 * chance.random())
    when = {"operation": chance.randint(1, 40), "delay": chance.random() * 0.02, "seconds": seconds}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            first.run, {"what": "stop", "rank": planted.EVERY, "host": "one"} | when
        )
        _wait_for_lock(first, running)
        code, losses = second.run({"host": "two"})
        while code == 2 and not running.done():  # it came before the first was stopped
            code, losses = second.run({"host": "two"})
        ended, stale = running.result()
    # Stopped while it started, it goes on from what the second has saved by then.
    same_steps = not stale or (
        resumed_well(stale, min(stale) - 1, straight) and max(stale) == STEPS
    )
    good = first.good() == STEPS == folders.tracked(first.saves) and _all_whole(first.saves)
    if code == 0:
        good = good and (not losses or resumed_well(losses, min(losses) - 1, straight))
    if not (good and same_steps and ended in (0, 1)):
        print(
            f"{first.folder}: {ended} {sorted(stale)}, {code} {sorted(losses)}, {first.good()}",
            file=sys.stderr,
            flush=True,
        )
    return good and same_steps and ended in (0, 1), 0


_TWO_HOSTS = (_first_lives, _first_is_killed, _first_is_stopped)


def _wait_for_lock(runs: Runs, running: Future) -> None:
    while not (runs.saves / lock.NAME).exists() and not running.done():
        time.sleep(0.01)


def _all_whole(saves: Path) -> bool:
    return all(
        not manifest.defect(folders.folder_of(saves, step)) for step in folders.published(saves)
    )


def failing_disk(
    what: str, rounds: int, folder: Path, straight: Losses, chance: random.Random
) -> list[Outcome]:
    """A disk of its own that fills up in the middle of a save, or becomes read-only: training goes
    on; mended, it saves again.
    """
    outcomes = []
    for turn in range(rounds):
        disk = folder / f"disk{turn}"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=True)
        try:
            outcomes.append(
                _one_disk(
                    what,
                    Runs(folder / f"round{turn}", STEPS, saves=disk / "saves"),
                    disk,
                    straight,
                    chance,
                )
            )
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return outcomes


def _one_disk(
    what: str, runs: Runs, disk: Path, straight: Losses, chance: random.Random
) -> Outcome:
    runs.run(until=INTERVAL)  # one good checkpoint, which must outlive what comes
    when = {"operation": chance.randint(1, 14)}
    if what == "freeze":
        when = {"step": INTERVAL + chance.randint(1, 5), "delay": 0.0}
    if what == "spare":  # a moment later, with space for a part of a checkpoint
        whole = manifest.size(folders.folder_of(runs.saves, INTERVAL))
        when |= {"delay": chance.random() * SAVE_S, "spare": chance.randrange(whole)}
    if what == "load":
        when = {
            "operation": chance.randint(1, 8),
            "reading": True,
            "delay": chance.random() * SAVE_S,
        }
    code, losses = runs.run(
        {"what": "freeze" if what == "freeze" else "fill", "rank": 0, "disk": str(disk)} | when
    )
    # the last save is missing
    went_on = resumed_well(losses, INTERVAL, straight) and max(losses) == runs.steps and code == 1
    good = runs.good()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    (disk / "filler").unlink(missing_ok=True)
    code, again = runs.run()
    recovered = (
        code == 0
        and resumed_well(again, good, straight)
        and runs.good() == runs.steps
        and good >= INTERVAL
    )
    return went_on and recovered, runs.steps - good


def two_at_once(
    rounds: int, folder: Path, straight: Losses, chance: random.Random
) -> list[Outcome]:
    """A second job with the same --save begins while the first trains: it is rejected, and the
    first loses nothing.
    """
    outcomes = []
    for turn in range(rounds):
        first = Runs(folder / f"round{turn}", STEPS)
        second = Runs(folder / f"round{turn}" / "second", STEPS, saves=first.saves)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(first.run)
            _wait_for_lock(first, running)
            rejected, trained = second.run()
            code, losses = running.result()
        good = code == 0 and resumed_well(losses, 0, straight) and first.good() == STEPS
        outcomes.append((good and _all_whole(first.saves) and rejected == 2 and not trained, 0))
    return outcomes


def undisturbed(
    plan: Callable[[Path, random.Random], tuple[dict, list[str]]],
    rounds: int,
    folder: Path,
    straight: Losses,
    chance: random.Random,
) -> list[Outcome]:
    """A fault that must not end the job: no step is done twice, and the last checkpoint is there.

    plan: makes the fault and the flags of a round from the folder of its run and the generator.
    """
    outcomes = []
    for turn in range(rounds):
        run_dir = folder / f"round{turn}" / "run"
        fault, flags = plan(run_dir, chance)
        runs = Runs(folder / f"round{turn}", STEPS, saves=run_dir / "saves", flags=tuple(flags))
        code, losses = runs.run(fault)
        good = (
            code == 0 and resumed_well(losses, 0, straight) and max(losses) == STEPS == runs.good()
        )
        outcomes.append((good, 0))
    return outcomes


def _suspended(run_dir: Path, chance: random.Random) -> tuple[dict, list[str]]:
    when = {"step": chance.randint(2, 2 * INTERVAL), "delay": chance.random() * 0.05}
    return {"what": "stop", "rank": planted.EVERY, "seconds": 3 * HOP_TIMEOUT} | when, [
        "--cp-ring-hop-timeout",
        str(HOP_TIMEOUT),
    ]


def _stopped_in_a_save(run_dir: Path, chance: random.Random) -> tuple[dict, list[str]]:
    when = {"operation": chance.randint(1, 4), "delay": chance.random() * SAVE_S, "seconds": 1}
    return {"what": "stop", "rank": chance.choice([0, 1, planted.EVERY])} | when, []


def _slow_save(run_dir: Path, chance: random.Random) -> tuple[dict, list[str]]:
    fault = {
        "what": "linger",
        "rank": 0,
        "operation": chance.randint(1, 14),
        "seconds": 2 * HOP_TIMEOUT,
    }
    return fault, ["--cp-ring-hop-timeout", str(HOP_TIMEOUT)]


def _removed(run_dir: Path, chance: random.Random) -> tuple[dict, list[str]]:
    when = {"step": chance.randint(2, 2 * INTERVAL), "delay": chance.random() * 0.05}
    fault = {"what": "remove", "rank": 0, "folder": str(run_dir)} | when
    return fault, [
        "--cp-ring-run-dir",
        str(run_dir),
        "--tensorboard-dir",
        str(run_dir / "tensorboard"),
    ]


def stopped(rounds: int, folder: Path, straight: Losses, chance: random.Random) -> list[Outcome]:
    """One rank is stopped (SIGSTOP) and stays so: the other one ends the job with a report, and a
    restart goes on.
    """
    outcomes = []
    for turn in range(rounds):
        runs = Runs(
            folder / f"round{turn}", STEPS, flags=("--cp-ring-hop-timeout", str(HOP_TIMEOUT))
        )
        victim = chance.randrange(RANKS)
        fault = {
            "what": "stop",
            "rank": victim,
            "step": chance.randint(2, STEPS - 1),
            "delay": chance.random() * 0.05,
        }
        code, losses = runs.run(fault)
        reached, good = max(losses, default=0), runs.good()
        said = (
            f"first stuck: rank {victim}, which does not answer"
            in (runs.folder / "run1.log").read_text()
        )
        code_again, again = runs.run()
        recovered = code_again == 0 and resumed_well(again, good, straight) and runs.good() == STEPS
        outcomes.append((code == watchdog.EXIT_CODE and said and recovered, reached - good))
    return outcomes


def disturbed_while_it_restarts(
    what: str, rounds: int, folder: Path, straight: Losses, chance: random.Random
) -> list[Outcome]:
    """A job that resumes is disturbed while it reads its checkpoint.

    what: "kill" of a rank at a file operation, "kill later" at a random moment after one: the next
        restart goes on all the same; "stop" of one rank or all for a second: the job goes on
        itself.
    """
    base = Runs(folder / "base", STEPS)
    base.run(until=2 * INTERVAL)
    outcomes = []
    for turn in range(rounds):
        runs = Runs(folder / f"round{turn}", STEPS)
        shutil.copytree(base.saves, runs.saves)
        fault = {
            "what": what.split()[0],
            "rank": chance.randrange(RANKS),
            "operation": chance.randint(1, 8),
            "reading": True,
        }
        fault |= {} if what == "kill" else {"delay": chance.random() * SAVE_S}
        fault |= (
            {"seconds": 1, "rank": chance.choice([0, 1, planted.EVERY])} if what == "stop" else {}
        )
        code, losses = runs.run(fault)
        ended = code == -signal.SIGKILL
        # a late kill may find the job in its first steps
        if what == "stop" or (what == "kill later" and losses):
            begun = resumed_well(losses, 2 * INTERVAL, straight)
            ended = begun and (ended or (code == 0 and max(losses) == STEPS))
        good = runs.good()
        code_again, again = runs.run()
        through = good == STEPS and not again
        recovered = (
            code_again == 0
            and (through or resumed_well(again, good, straight))
            and runs.good() == STEPS
        )
        outcomes.append(
            (
                ended and recovered and (what != "kill" or not losses),
                max(losses, default=good) - good,
            )
        )
    return outcomes


def resumed_at_another_size(
    rounds: int, folder: Path, straight: Losses, chance: random.Random
) -> list[Outcome]:
    """A rank is killed during a save; the job resumes at context parallel size 1 or 4."""
    outcomes = []
    for turn in range(rounds):
        runs = Runs(folder / f"round{turn}", STEPS)
        runs.run(until=INTERVAL)
        _, losses = runs.run(random_kill("save", INTERVAL, chance))
        reached, good = max(losses, default=INTERVAL), runs.good()
        code, again = runs.run(ranks=(1, 4)[turn % 2])
        through = good == STEPS and not again
        recovered = (
            code == 0
            and (through or resumed_well(again, good, straight, 1e-5))
            and runs.good() == STEPS
        )
        outcomes.append((recovered, reached - good))
    return outcomes


def failing_logs(
    what: str, rounds: int, folder: Path, straight: Losses, chance: random.Random
) -> list[Outcome]:
    """The disk of the run directory, of TensorBoard and of the output fills up, or the run
    directory becomes read-only.
    """
    outcomes = []
    for turn in range(rounds):
        disk = folder / f"disk{turn}"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
        try:
            flags = ["--cp-ring-run-dir", str(disk / "run"), "--log-interval", "1"]
            flags += ["--tensorboard-dir", str(disk / "tensorboard")] if what == "fill" else []
            runs = Runs(folder / f"round{turn}", STEPS, flags=tuple(flags))
            when = {"step": chance.randint(2, STEPS - 2), "delay": chance.random() * 0.05}
            log = disk / "output.log" if what == "fill" else None
            code, losses = runs.run({"what": what, "rank": 0, "disk": str(disk)} | when, log=log)
            good = (
                code == 0
                and resumed_well(losses, 0, straight)
                and max(losses) == STEPS == runs.good()
            )
            in_time = (disk / "filler").exists() or len(progress.read(disk / "run")) < STEPS
            outcomes.append((good and in_time, 0))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return outcomes


FAULTS: dict[str, Callable[[int, Path, Losses, random.Random], list[Outcome]]] = {
    "a rank killed at a random step": lambda *rest: killed("step", (), *rest),
    "a rank killed during a save": lambda *rest: killed("save", (), *rest),
    "a rank killed during an asynchronous save": lambda *rest: killed(
        "asynchronous save", tuple(ASYNC), *rest
    ),
    "a rank killed at a random moment of a save": lambda *rest: killed(
        "moment of a save", (), *rest
    ),
    "a rank killed at a random moment of an asynchronous save": lambda *rest: killed(
        "moment of an asynchronous save", tuple(ASYNC), *rest
    ),
    "a rank killed during a commit": lambda *rest: killed("commit", (), *rest),
    "a rank killed while it restarts": lambda *rest: disturbed_while_it_restarts("kill", *rest),
    "a rank killed at a random moment of a load": lambda *rest: disturbed_while_it_restarts(
        "kill later", *rest
    ),
    "ranks stopped for a moment in a load": lambda *rest: disturbed_while_it_restarts(
        "stop", *rest
    ),
    "ranks stopped for a moment in a save": lambda *rest: undisturbed(_stopped_in_a_save, *rest),
    "a save killed, resumed at another size": resumed_at_another_size,
    "a rank stopped for good": stopped,
    "all ranks stopped for a while": lambda *rest: undisturbed(_suspended, *rest),
    "a save longer than the hop timeout": lambda *rest: undisturbed(_slow_save, *rest),
    "a damaged checkpoint": corrupted,
    "files swapped while they are loaded": swapped,
    "two jobs at once": two_at_once,
    "two hosts in one folder": two_hosts,
    "a run directory removed": lambda *rest: undisturbed(_removed, *rest),
    "a full disk": lambda *rest: failing_disk("fill", *rest),
    "a disk that fills up at a random moment of a save": lambda *rest: failing_disk("spare", *rest),
    "a disk that fills up at a random moment of a load": lambda *rest: failing_disk("load", *rest),
    "a read-only disk": lambda *rest: failing_disk("freeze", *rest),
    "a full disk at the logs": lambda *rest: failing_logs("fill", *rest),
    "a read-only disk at the run directory": lambda *rest: failing_logs("freeze", *rest),
}


def own_mounts() -> bool:
    """Gives this process mounts that nobody else sees; False where it may not."""
    try:
        os.unshare(os.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each fault")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(FAULTS),
        default=list(FAULTS),
        metavar="FAULT",
        help="these faults alone",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # as for all ranks of tests
    mounts, entries = own_mounts(), []
    with tempfile.TemporaryDirectory(prefix="cp_ring-faults-") as folder:
        straight = Runs(Path(folder) / "straight", STEPS).run(save=False)[1]
        for place, fault in enumerate(given.only):
            if "disk" in fault and not mounts:
                print(f"{fault}: left out: it takes root to mount a small disk", file=sys.stderr)
                continue
            outcomes = FAULTS[fault](
                given.rounds,
                Path(folder) / str(place),
                straight,
                random.Random(f"{given.seed} {fault}"),
            )
            recovered, lost = sum(good for good, _ in outcomes), sum(steps for _, steps in outcomes)
            entries.append(
                {
                    "fault": fault,
                    "rounds": len(outcomes),
                    "recovered": recovered,
                    "lost_steps": lost,
                }
            )
            if not given.json:
                print(
                    f"{fault}: {len(outcomes)} rounds, {recovered} recovered, {lost} steps done "
                    "again",
                    flush=True,
                )
    if given.json:
        print(json.dumps(entries))
    return int(any(entry["recovered"] < entry["rounds"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
