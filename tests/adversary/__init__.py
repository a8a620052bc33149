"""Attacks on cp_ring, generated and harmless:
`python -m tests.adversary [--json] [--times N] [--only ATTACK]`.

To add an attack, write a function that yields a `Try` for each try, mark it with `@attack("name")`
in a module of this package, and import that module in `tests/adversary/__main__.py`. One that draws
its tries at random is marked with `@attack("name", cases=100)` and takes the number of tries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Try:
    """One try of an attack. problem: what the attack achieved, or "" where cp_ring held."""

    name: str
    problem: str = ""


Attack = Callable[..., Iterator[Try]]


@dataclass(frozen=True)
class Registered:
    """An attack: a function of an empty folder and, where it is random, of the number of its tries,
    by default `cases`.
    """

    function: Attack
    cases: int | None = None

    def tries(self, folder: Path, times: int = 1) -> Iterator[Try]:
        """The tries; `times` as many of a random attack."""
        return (
            self.function(folder)
            if self.cases is None
            else self.function(folder, self.cases * times)
        )


ATTACKS: dict[str, Registered] = {}


def attack(name: str, cases: int | None = None) -> Callable[[Attack], Attack]:
    """Registers a function as the attack `name`."""

    def register(function: Attack) -> Attack:
        assert name not in ATTACKS, name
        ATTACKS[name] = Registered(function, cases)
        return function

    return register
