"""Wrong inputs, each of which must end in one good line. The tables are the `.txt` files here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A wrong input of a kind, and words that its line must have; those of further lines, where it
    is wrong for several reasons.
    """

    kind: str
    text: str
    words: list[str]
    further: tuple[list[str], ...] = ()


def cases(table: str) -> list[Case]:
    """Those of `table`.txt: `[kind]`, then a line `text => word & word | word of a second line`."""
    found, kind = [], ""
    for line in Path(__file__).with_name(f"{table}.txt").read_text().splitlines():
        if line.startswith("["):
            kind = line.strip("[]")
        elif " => " in line:
            text, _, words = line.rpartition(" => ")
            first, *more = (line.split(" & ") for line in words.split(" | "))
            found.append(Case(kind, text, first, tuple(more)))
    return found


def sample(table: str, every: int) -> list[Case]:
    """The first case of each kind, and then one in so many."""
    kinds = itertools.groupby(cases(table), lambda case: case.kind)
    return [case for _, its in kinds for case in list(its)[::every]]


def fault(line: str, words: list[str]) -> str:
    """Why `line` is not the one good line that has these words, "" where it is."""
    missing = [word for word in words if word not in line]
    if not line.strip() or len(line.splitlines()) != 1 or len(line) > 500:
        return f"{len(line.splitlines())} lines of {len(line)} characters: {line[:200]!r}"
    return f"{line!r} lacks {missing}" if missing else ""
