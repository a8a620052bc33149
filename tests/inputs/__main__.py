"""Tries all wrong inputs, or those that have a word; exit code 1 unless each ends in one good line."""

from __future__ import annotations

import sys
from collections import Counter

from tests.inputs import calls, cases, commands

TABLES = {"calls": calls.attempt, "commands": commands.attempt}


def main() -> int:
    tried, wrong = Counter[str](), Counter[str]()
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for table, attempt in TABLES.items():
        for case in cases(table):
            if wanted not in f"{case.kind} {case.text}":
                continue
            problem = attempt(case)
            tried[case.kind] += 1
            wrong[case.kind] += bool(problem)
            if problem:
                print(f"{case.kind}: {case.text}: {problem}", file=sys.stderr)
    for kind, count in tried.items():
        print(f"{kind}: {count} inputs, {wrong[kind]} wrong")
    print(f"all: {tried.total()} inputs, {wrong.total()} wrong")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
