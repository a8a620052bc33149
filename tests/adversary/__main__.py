"""Runs the attacks; exit code 1 unless cp_ring held in every try."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.adversary import ATTACKS, checkpoints, plans  # noqa: F401  (importing a module registers its attacks)


def run(names: list[str], times: int = 1) -> tuple[list[dict[str, int | str]], list[str]]:
    """An entry {"attack", "tries", "held"} for each attack, and a line for each try in which
    cp_ring did not hold.

    times: how many times as many tries random attacks have.
    """
    entries: list[dict[str, int | str]] = []
    failures: list[str] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="cp_ring-adversary-") as folder:
            tries = list(ATTACKS[name].tries(Path(folder), times))
        failed = [f"{name}: {one.name}: {one.problem}" for one in tries if one.problem]
        entries.append({"attack": name, "tries": len(tries), "held": len(tries) - len(failed)})
        failures += failed
    return entries, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of entries {attack, tries, held}"
    )
    parser.add_argument(
        "--times", type=int, default=1, help="so many times as many tries of random attacks"
    )
    given = parser.parse_args()
    entries, failures = run(given.only, given.times)
    for line in failures:
        print(line, file=sys.stderr)
    if given.json:
        print(json.dumps(entries))
    else:
        for entry in entries:
            print("{attack}: {tries} tries, {held} held".format(**entry))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
