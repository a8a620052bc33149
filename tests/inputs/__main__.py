"""Tries all wrong inputs; exit code 1 unless each ends in one good line."""

from __future__ import annotations

import sys
from collections import Counter

from tests.inputs import calls, cases

TABLES = {"calls": calls.attempt}


def main() -> int:
    tried, wrong = Counter[str](), Counter[str]()
    for table, attempt in TABLES.items():
        for case in cases(table):
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
